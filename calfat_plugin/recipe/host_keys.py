"""Configuration keys that FedML 0.9.6 reads from its flat ``args`` object.

Collected once from the host's sources, so that a recipe can be checked without importing the host. Only used to
distinguish a misspelt key from a key of the host.
"""

from __future__ import annotations

_KEYS = """
    account_id action agent_config alpha api_key arch arch_learning_rate arch_weight_decay attack_case
    attack_iteration_idxs attack_mode attack_prob attack_round_num attack_training_rounds attack_type
    auxiliary auxiliary_weight b_symmetric backbone backbone_freezed backbone_pretrained backend batch_idx
    batch_size byzantine_client_num checkname ci client_id client_id_list client_idx client_model
    client_num_in_total client_num_per_round client_number client_optimizer clipping clipping_norm
    cloud_region comm comm_round config_version contribution_alg cpu_transfer cuda_rpc_gpu_mapping
    current_device_id current_running_dir custom_logger customized_training_mqtt_config
    customized_training_s3_config customized_training_thetastore_config customized_training_web3_config cutout
    cutout_length dampening data data_cache_dir data_col_idx data_file_path data_parallel data_silo_config
    dataset deeplearning_backend defense_type delta device device_id device_type distribution dp_solution_type
    drop_path_prob early_stopping edge_id enable_attack enable_contribution enable_cuda_rpc enable_defense
    enable_dp enable_fhe enable_rdp_accountant enable_tracking enable_wandb end_point_id end_point_name
    endpoint_id env_version environment_hetero_ratio epoch epochs epochs_client epochs_server epsilon
    evaluation_frequency extra_save_steps extra_url extract_feat fa_task feddyn_alpha federated_optimizer
    fedprox fedprox_mu fl_trainer flag fraction freeze_bn frequency_of_the_test frequency_of_train_acc_report
    general_edge_id global_model_file_path gmf gpu gpu_hetero_ratio gpu_id gpu_mapping_file gpu_mapping_key
    gpu_num_per_server gpu_server_num gpu_util_parse grad_clip group_comm_round group_method group_num
    group_server_id_list grpc_ipconfig_path infer_port infer_url init_channels initialize_all_clients
    is_browser is_mobile iteration_number lambda_train_regularizer lambda_valid_regularizer latency
    launcher_rdzv_port layers learning_rate learning_rate_min local_iterations local_on_premise_platform_host
    local_on_premise_platform_port local_rank log_file_dir log_file_path log_server_url loss_type lr
    lr_decay_rate lr_milestones lr_schedule lr_scheduler lr_step lr_step_size main_process_first
    malicious_client_id manual_launch marketplace_type master_address max_grad_norm max_seq_length
    max_word_len mechanism_type metric mimelite ml_engine mlops_api_key mlops_project_name mlops_run_name mode
    model model_file_cache_folder model_id model_name model_path model_type model_version momentum
    mqtt_config_path mu multi_gpu_server n_node_in_silo n_proc_in_silo n_proc_per_node name nesterov
    network_interface no_bn_wd no_gpu_check node_addresses node_rank noise_multiplier num num_images optimizer
    original_class_list os_name output_dir outstride part_file partition_alpha partition_file_path
    partition_method pg_master_address pg_master_port poison_end_round_id poison_start_round_id poison_type
    poisoned_training_round precision_parameter price_per_hour prime_number privacy_guarantee
    private_local_data proc_rank_in_silo process_id protected_layers random_seed rank rank_in_node
    ratio_of_poisoned_client rdp_alpha redis_addr redis_password redis_port report_freq role round_idx
    run_device_id run_id run_name runner_cmd runtime_est_mode s3_config_path save save_client_model save_model
    save_on_each_node save_strategy scale_factor_ scenario seed sensitivity seperator server_agent_id
    server_id server_lr server_momentum server_optimizer should_save sigma simulation_environment_hetero
    simulation_gpu_hetero simulation_schedule simulator_daemon skip_log_model_net stage subdir sweep sync_bn
    synthetic_data_url sys_perf_profiling target_class_list targeted_number_active_clients tau_max tau_min
    temperature test test_batch_size test_on_clients test_size time_varying topology_neighbors_num_directed
    topology_neighbors_num_undirected train_data_num_in_total train_portion train_size training_type
    trpc_master_config_path type unique_device_id use_all_data use_updates user user_name using_gpu
    using_mlops version wandb_entity wandb_group_id wandb_key wandb_name wandb_only_server wandb_project wd
    weight_decay whether_distill_on_the_server whether_training_on_client worker_num
"""

HOST_KEYS: frozenset[str] = frozenset(_KEYS.split())
