"""The tables of README.md, made of the records beside this file.

python -m studies.attackers.tables
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from studies import pages
from studies.records import difference, read, runs

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
SUITE, RATES_SUITE = (
    yaml.safe_load((HERE / f"attackers_digits{name}.yaml").read_text(encoding="utf-8")) for name in ("", "_rates")
)
BETAS, METHODS, ATTACKS, RULES = (list(labels) for labels in SUITE["axes"].values())
NONE, *ATTACKED = ATTACKS


def of_suite() -> pd.DataFrame:
    """Its runs, by beta, method, attack, rule and seed."""
    table = runs(HERE / "attackers_digits.csv").reset_index()
    labels = table["cell"].str.split("/", expand=True).set_axis(["beta", "method", "attack", "rule"], axis=1)
    return pd.concat([labels, table], axis=1).set_index(["beta", "attack", "rule", "method", "seed"]).sort_index()


RUNS = of_suite()


def values(metric: str, beta: str, attack: str, rule: str) -> pd.Series:
    """What the runs of one beta, attack and rule measured, by method and seed."""
    if (beta, attack, rule) not in RUNS.index:
        return pd.Series(dtype=float)
    return RUNS.loc[(beta, attack, rule), metric].dropna()


def means(whole: int, *measured: pd.Series) -> str:
    """The mean of each in percent; with the number of runs where some are left to do."""
    number = len(measured[0])
    left = "" if number == whole else f" ({number} of {whole})"
    return " / ".join(f"{100 * numbers.mean():.1f}" for numbers in measured) + left if number else "-"


def change(one: pd.Series, other: pd.Series) -> str:
    """``one`` minus ``other`` in points, paired over seeds, whose values are means over the methods of both."""
    gain = (one - other).dropna()
    return difference(gain.groupby(level="seed").mean()).text() if len(gain) else "-"


# --- tables -----------------------------------------------------------------------------------------------------------


def accuracies(beta: str) -> pages.Table:
    """Natural / PGD-20 by rule and attack."""
    table = [["rule", *ATTACKS, "lowest PGD-20"]]
    for rule in RULES:
        natural, robust = (
            {attack: values(metric, beta, attack, rule) for attack in ATTACKS} for metric in ("natural", "pgd20")
        )
        cells = [means(len(METHODS) * len(SUITE["seeds"]), natural[a], robust[a]) for a in ATTACKS]
        lowest = min((found.mean(), attack) for attack, found in robust.items() if len(found))
        table.append([rule, *cells, f"{100 * lowest[0]:.1f} ({lowest[1]})"])
    return 1, table


def losses(beta: str) -> pages.Table:
    """PGD-20 with attackers minus the same rule without; and without them minus FedAvg."""
    average = values("pgd20", beta, NONE, RULES[0])
    table = [["rule", f"{NONE}, minus {RULES[0]}", *ATTACKED]]
    for rule in RULES:
        without = values("pgd20", beta, NONE, rule)
        cost = "" if rule == RULES[0] else change(without, average)
        table.append([rule, cost, *(change(values("pgd20", beta, attack, rule), without) for attack in ATTACKED)])
    return 1, table


def methods(beta: str) -> pages.Table:
    """PGD-20 by method, rule and attack: the mean over seeds."""
    table = [["method", "rule", *ATTACKS]]
    for method in METHODS:
        for rule in RULES:
            found = (values("pgd20", beta, attack, rule) for attack in ATTACKS)
            of_method = [of[of.index.get_level_values("method") == method] for of in found]
            table.append([method, rule, *(means(len(SUITE["seeds"]), numbers) for numbers in of_method)])
    return 2, table


def named(_: str) -> pages.Table:
    """Shares of attackers and of honest clients that a run's findings named, by beta and attack."""
    table = [["beta", "attack", "runs", "attackers named", "honest clients named"]]
    for beta in BETAS:
        for attack in ATTACKS:
            shares = [
                pd.concat([values(who, beta, attack, rule) for rule in RULES])
                for who in ("attackers_named", "others_named")
            ]
            percent = (f"{100 * of.mean():.1f} %" if len(of) else "-" for of in shares)
            table.append([beta, attack, str(len(shares[1])), *percent])
    return 1, table


def rates(_: str) -> pages.Table:
    """Mean of natural and PGD-20 on validation images at each learning rate, over betas and seeds; the best in bold."""
    tried = read(HERE / "attackers_digits_rates.csv")
    tried = tried.assign(
        method=tried["cell"].str.partition("/")[2], rate=tried["tried"].str.removeprefix("learning_rate ")
    )
    scores = tried[tried["tried"] != ""].pivot_table(index="method", columns="rate", values="choice")
    table = [["method", *scores.columns]]
    for method in METHODS:
        of = scores.loc[method]
        table.append([method, *(f"**{100 * v:.1f}**" if v == of.max() else f"{100 * v:.1f}" for v in of)])
    return 1, table


TABLES: pages.Tables = {
    "accuracies": accuracies,
    "losses": losses,
    "methods": methods,
    "named": named,
    "rates": rates,
}


def main() -> None:
    """Write the tables."""
    pages.write_tables(PAGE, "attackers", TABLES)


if __name__ == "__main__":
    main()
