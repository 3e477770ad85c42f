"""Every key that FedML 0.9.6 reads from its flat ``args`` object, with what it means in a run of this package.

Sorted from the host's sources, so that a recipe can be checked without importing the host; a test scans the installed
host for keys that are missing here. The sections are where people write the keys. They have no further meaning: the
host puts all sections on one object, so a key is looked up by its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple


class Effect(Enum):
    """What a key of the host does here."""

    ACTS = auto()
    OVERRIDDEN = auto()
    NOTHING = auto()
    RENAMED = auto()
    REFUSED = auto()


class HostKey(NamedTuple):
    """A row of the table.

    Attributes:
        effect: what the key does here.
        text: OVERRIDDEN: what decides instead. NOTHING: why. RENAMED: the right key, with its section. REFUSED: why.
        switch: key that turns this one on; while that is false, this one means nothing and promises nothing.
        harmless: values that ask for nothing and draw no complaint, as null never does.
    """

    effect: Effect
    text: str = ""
    switch: str = ""
    harmless: tuple[object, ...] = ()


def _acts(switch: str, keys: str) -> dict[str, HostKey]:
    return dict.fromkeys(keys.split(), HostKey(Effect.ACTS, switch=switch))


def _decided(by: str, keys: str) -> dict[str, HostKey]:
    return dict.fromkeys(keys.split(), HostKey(Effect.OVERRIDDEN, by))


def _nothing(why: str, keys: str) -> dict[str, HostKey]:
    return dict.fromkeys(keys.split(), HostKey(Effect.NOTHING, why, harmless=(False,)))


def _spelt(right: str, keys: str) -> dict[str, HostKey]:
    return dict.fromkeys(keys.split(), HostKey(Effect.RENAMED, right))


def _refused(why: str, keys: str, *harmless: object) -> dict[str, HostKey]:
    return dict.fromkeys(keys.split(), HostKey(Effect.REFUSED, why, harmless=harmless))


def _switched(why: str, switch: str, keys: str) -> dict[str, HostKey]:
    """A refused switch, and what means something only while it is on."""
    parameter = HostKey(Effect.REFUSED, why, switch)
    return {**_refused(why, switch, False), **dict.fromkeys(keys.split(), parameter)}


_SECURE_AGGREGATION = "there is no secure aggregation here: the server sees every client's update"
_PRIVACY = "there is no differential privacy here: no client's update is clipped and no noise is added"
_DEFENCE = (
    "FedML's own defences do not run here: calfat.aggregator combines the updates, and defense_args with "
    "enable_defense: true and a defense_type selects one"
)
_ATTACK = (
    "FedML's own attacks do not run here: a group of calfat.clients may have an attacker, and attack_args with "
    "enable_attack: true and an attack_type select one"
)
_ENCRYPTION = "there is no homomorphic encryption here: the server sees every client's update"
_TRACKING = (
    "FedML's own tracking cannot start: fedml 0.9.6 calls a function of its own with the wrong number of arguments "
    "(core/mlops/__init__.py:131); calfat.loggers can record the run"
)

REFUSED_SECTIONS: Mapping[str, HostKey] = {
    "dp_args": HostKey(Effect.REFUSED, _PRIVACY, "enable_dp"),
    "defense_args": HostKey(Effect.REFUSED, _DEFENCE, "enable_defense"),
    "attack_args": HostKey(Effect.REFUSED, _ATTACK, "enable_attack"),
    "fhe_args": HostKey(Effect.REFUSED, _ENCRYPTION, "enable_fhe"),
}
"""Sections in which every key, also one that the host does not know, promises what there is not."""

REFUSED_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("lsa", "sa", "turbo_aggregate"), _SECURE_AGGREGATION),
    "fedavg_robust": _DEFENCE,
}
"""Values of ``train_args.federated_optimizer``, in lower case, that promise what there is not."""

_AGENT = "only the agents of FedML's platform read it"
_OTHER = "only other algorithms and models of FedML read it"
_CHECKPOINTS = "a run always writes its checkpoints to its run directory"
_LOG = "the log is log.txt in the run directory"
_FA = "only FedML's federated analytics read it"

HOST_KEYS: Mapping[str, Mapping[str, HostKey]] = {
    "common_args": {
        **_spelt("common_args.random_seed", "seed"),
        **_refused(_TRACKING, "using_mlops", False),
        **_refused(
            "the host ends the process as soon as it is asked for hierarchical silos (fedml 0.9.6, __init__.py:389)",
            "scenario",
            "horizontal",
        ),
        **_decided(
            "the process itself, or --rank of `calfat run`", "rank local_rank role process_id run_id comm round_idx"
        ),
        **_decided("calfat.runtime", "deeplearning_backend ml_engine"),
        **_nothing(
            _AGENT,
            "account_id action agent_config api_key client_id cloud_region config_version current_device_id "
            "current_running_dir device_id edge_id end_point_id end_point_name endpoint_id env_version extra_url "
            "general_edge_id infer_port infer_url local_on_premise_platform_host local_on_premise_platform_port "
            "log_server_url marketplace_type metric model_id model_version name no_gpu_check num os_name "
            "price_per_hour redis_addr redis_password redis_port run_device_id runner_cmd server_agent_id server_id "
            "simulator_daemon type unique_device_id user user_name version",
        ),
        **_nothing(_FA, "data_col_idx fa_task flag k max_word_len seperator use_all_data"),
        **_nothing(_OTHER, "custom_logger main_process_first mode should_save sweep test"),
    },
    "data_args": {
        **_decided(
            "data_args.data_cache_dir", "data_file_path partition_file_path part_file private_local_data subdir"
        ),
        **_decided("data_args.dataset", "data synthetic_data_url train_size test_size train_portion"),
        **_decided("data_args.partition_method", "distribution"),
        **_decided("train_args.client_num_in_total", "client_number train_data_num_in_total"),
        **_nothing("each data set brings its own augmentation", "cutout cutout_length"),
        **_nothing(_OTHER, "max_seq_length num_images"),
    },
    "model_args": {
        **_spelt("model_args.model", "model_name"),
        **_decided("model_args.model", "arch client_model global_model_file_path model_path model_type stage"),
        **_decided("calfat.model", "init_channels layers drop_path_prob"),
        **_nothing(
            _OTHER,
            "auxiliary auxiliary_weight backbone backbone_freezed backbone_pretrained extract_feat freeze_bn outstride "
            "sync_bn",
        ),
        **_nothing(_CHECKPOINTS, "model_file_cache_folder"),
    },
    "train_args": {
        **_spelt("train_args.learning_rate", "lr"),
        **_spelt("train_args.epochs", "epoch local_epochs"),
        **_spelt("train_args.weight_decay", "wd"),
        **_spelt("train_args.client_optimizer", "optimizer"),
        **_spelt("train_args.local_steps", "local_iterations"),
        **_spelt("train_args.lr_schedule", "lr_scheduler"),
        **_spelt("train_args.lr_step_size", "lr_step"),
        **_spelt("train_args.max_grad_norm", "grad_clip"),
        **_decided("train_args.epochs", "epochs_client epochs_server"),
        **_decided("train_args.comm_round", "group_comm_round iteration_number"),
        **_decided("train_args.client_num_in_total", "client_id_list"),
        **_decided("train_args.client_num_per_round", "worker_num initialize_all_clients"),
        **_decided(
            "calfat.aggregator",
            "alpha b_symmetric feddyn_alpha fedprox fedprox_mu fl_trainer gmf group_method group_num mimelite mu "
            "server_lr server_momentum server_optimizer tau_max tau_min use_updates",
        ),
        **_decided("calfat.trainer", "loss_type temperature whether_distill_on_the_server whether_training_on_client"),
        **_decided("train_args.lr_schedule and train_args.lr_step_size", "lr_milestones"),
        **_nothing("momentum has no dampening", "dampening"),
        **_nothing("weight decay holds for all parameters", "no_bn_wd"),
        **_nothing("every run has all of its rounds", "early_stopping"),
        **_nothing(
            _OTHER,
            "arch_learning_rate arch_weight_decay batch_idx client_idx lambda_train_regularizer "
            "lambda_valid_regularizer latency targeted_number_active_clients time_varying "
            "topology_neighbors_num_directed topology_neighbors_num_undirected",
        ),
        **_nothing("contributions of clients are not assessed", "enable_contribution contribution_alg"),
        **_nothing(
            _CHECKPOINTS,
            "checkname extra_save_steps output_dir save save_client_model save_model save_on_each_node save_strategy",
        ),
        **_refused(_SECURE_AGGREGATION, "precision_parameter prime_number privacy_guarantee"),
    },
    "validation_args": {
        **_decided(
            "calfat.monitor.every",
            "ci evaluation_frequency frequency_of_the_test frequency_of_train_acc_report report_freq",
        ),
        **_decided("calfat.evaluation.batch_size", "test_batch_size"),
        **_nothing("the global model is evaluated, not the clients'", "test_on_clients"),
    },
    "device_args": {
        **_decided(
            "device_args.using_gpu and device_args.gpu_id",
            "data_parallel device device_type gpu gpu_mapping_file gpu_mapping_key gpu_num_per_server gpu_server_num "
            "gpu_util_parse multi_gpu_server",
        ),
        **_nothing(
            "every client of a simulation is computed alike",
            "environment_hetero_ratio gpu_hetero_ratio runtime_est_mode simulation_environment_hetero "
            "simulation_gpu_hetero simulation_schedule",
        ),
        **_nothing(
            "each party is one process",
            "launcher_rdzv_port manual_launch master_address n_node_in_silo n_proc_in_silo n_proc_per_node "
            "network_interface node_addresses node_rank pg_master_address pg_master_port proc_rank_in_silo "
            "rank_in_node use_customized_hierarchical",
        ),
    },
    "comm_args": {
        **_decided("calfat.silo.parties", "data_silo_config grpc_ipconfig_path"),
        **_decided("calfat.silo.mqtt", "customized_training_mqtt_config mqtt_config_path"),
        **_decided("calfat.silo.s3", "customized_training_s3_config s3_config_path"),
        **_decided(
            "comm_args.backend",
            "cpu_transfer cuda_rpc_gpu_mapping customized_training_thetastore_config customized_training_web3_config "
            "enable_cuda_rpc group_server_id_list is_browser is_mobile trpc_master_config_path",
        ),
    },
    "tracking_args": {
        **_acts("enable_wandb", "run_name wandb_entity wandb_group_id wandb_only_server wandb_project"),
        **_decided("tracking_args.run_name", "wandb_name"),
        **_nothing("FedML does not read it; `wandb login` stores the key outside of recipes", "wandb_key"),
        **_nothing(_LOG, "log_file_dir log_file_path skip_log_model_net"),
        **_nothing("it only measures for FedML's own tracking", "sys_perf_profiling"),
        **_switched(_TRACKING, "enable_tracking", "mlops_api_key mlops_project_name mlops_run_name"),
    },
    "dp_args": _switched(
        _PRIVACY,
        "enable_dp",
        "C clipping clipping_norm delta dp_solution_type enable_rdp_accountant epsilon mechanism_type "
        "noise_multiplier rdp_alpha sensitivity sigma",
    ),
    "defense_args": _switched(
        _DEFENCE,
        "enable_defense",
        "batch_num beta bound_param bucket_size bucketing_batch_size clip_threshold cosine_similarity_bound "
        "defense_type gaussian_mu gaussian_sigma krum_param_m lambda_param norm_bound option_type "
        "pretraining_round_num robust_threshold stddev tau thresh to_keep_higher_scores trim_param_b",
    ),
    "attack_args": _switched(
        _ATTACK,
        "enable_attack",
        "attack_case attack_iteration_idxs attack_mode attack_prob attack_round_num attack_training_rounds attack_type "
        "byzantine_client_num fraction malicious_client_id original_class_list poison_end_round_id "
        "poison_start_round_id poison_type poisoned_training_round protected_layers ratio_of_poisoned_client "
        "scale_factor_S target_class_list",
    ),
    "fhe_args": _switched(_ENCRYPTION, "enable_fhe", ""),
    "environment_args": {},
    "client_specific_args": {},
}

BY_NAME: Mapping[str, HostKey] = {key: row for section in HOST_KEYS.values() for key, row in section.items()}
"""The whole table, by key."""
