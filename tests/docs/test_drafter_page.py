"""docs/drafter.md, "What ships": command lines that make the shipped drafters, figures of shipped curves and banks."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from dsim.drafter.recipe import RecipeFile, load_recipe
from dsim.figures_drafts import drafter_of
from experiments import acceptance, train_drafter
from experiments._banks import open_bank, open_banks

PAGE = (Path(__file__).parents[2] / "docs" / "drafter.md").read_text(encoding="utf-8")
SHIPS = PAGE.partition("## What ships\n")[2].partition("\n## ")[0]
DATA = Path(str(resources.files("dsim") / "data" / "drafter"))
#: Shipped curve and bank of each row of the table of commands; the less trained DSpark has no bank.
ROWS = {
    "DSpark, Markov head": ("dspark", "smollm2-dspark"),
    "the same, less trained": ("dspark-420k", None),
    "DFlash": ("dflash", "smollm2-dflash"),
    "Eagle3": ("eagle3", "smollm2-eagle3"),
    "MTP": ("mtp5", "smollm2-mtp5"),
    "DSpark, RNN head": ("dspark-rnn", "smollm2-dspark-rnn"),
}
COMMANDS = dict(re.findall(r"^\| (.+) \| `(--set .+?)`", SHIPS, re.MULTILINE))


def curve(name: str) -> pd.DataFrame:
    """A shipped learning curve."""
    return pd.read_csv(DATA / f"learning_curve-{name}.csv")


def recipe(command: str) -> RecipeFile:
    """What the command line trains."""
    given = train_drafter.options().parse_args(["--recipe", "long", *shlex.split(command)])
    return load_recipe(given.recipe, given.overrides)


def alphas(table: pd.DataFrame, first: int = 1, last: int = 7) -> list[float]:
    """Acceptance by position at the end of a curve."""
    return [float(table[f"alpha_{k}"].iloc[-1]) for k in range(first, last + 1)]


def test_every_shipped_curve_has_its_command_and_its_line_of_provenance() -> None:
    assert set(COMMANDS) == set(ROWS)
    files = {file.name for file in DATA.glob("learning_curve-*.csv")}
    assert files == {f"learning_curve-{name}.csv" for name, _ in ROWS.values()}
    lines = (DATA / "PROVENANCE.md").read_text(encoding="utf-8").splitlines()
    for name in files:
        (line,) = [line for line in lines if line.startswith(f"| `{name}`")]
        anchors, blocks = (int(cell.split()[0].replace(",", "")) for cell in line.split("|")[3:5])
        table = pd.read_csv(DATA / name)
        assert anchors == table["anchors"].iloc[-1]
        assert set(table["blocks"]) == {blocks}
        assert f"{blocks:,}" in SHIPS


@pytest.mark.parametrize("row", ROWS)
def test_the_commands_train_what_ships(row: str) -> None:
    """As many anchors as the curve ends with (a step has 48 at most), and the bank's architecture."""
    name, bank = ROWS[row]
    wanted, table = recipe(COMMANDS[row]), curve(name)
    assert 0 <= table["anchors"].iloc[-1] - wanted.training.anchors < 48
    assert sum(column.startswith("alpha_") for column in table) == wanted.drafter.gamma
    if bank is not None:
        opened = open_bank(bank)
        header, drafter = opened.bank.header, wanted.drafter
        head = "" if drafter.head == "none" else f"{drafter.head} "
        assert header.drafter == f"{drafter.kind} {head}{drafter.layers} layers"
        assert (header.gamma, drafter_of(header.drafter)) == (drafter.gamma, opened.drafter)


def test_the_table_is_that_of_the_curves() -> None:
    """The last row of a curve in the range of anchors that the page names."""
    names = ("dspark", "dflash", "eagle3", "mtp5")
    rows = re.findall(r"^\| ([\d,]+)(?: to ([\d,]+))?(, rate lowered at the end)? \| (.+) \|$", SHIPS, re.MULTILINE)
    assert len(rows) == 5
    for first, last, lowered, cells in rows:
        low, high = (int(text.replace(",", "")) for text in (first, last or first))
        for name, cell in zip(names, cells.split("|"), strict=True):
            if not cell.strip():
                continue
            table = curve("dspark-420k" if lowered and low == 420_000 and name == "dspark" else name)
            part = table[table["anchors"].between(low, high + 47)]
            assert round(float(part["tau_teacher"].iloc[-1]), 2) == float(cell), (name, low)
            assert bool(lowered) == (part.index[-1] == table.index[-1])


def test_the_figures_in_the_text_are_those_of_the_curves() -> None:
    text = " ".join(SHIPS.split())
    ends = {"DSpark": curve("dspark-420k"), "DFlash": curve("dflash"), "Eagle3": curve("eagle3")}
    for label, table in ends.items():
        assert f"{label} {' '.join(f'{value:.2f}' for value in alphas(table))}" in text
    one, other = ends["DSpark"], ends["DFlash"]
    near, far = (sum(alphas(one, 2, last)) / sum(alphas(other, 2, last)) for last in (4, 7))
    assert (
        f"{alphas(one)[0] / alphas(other)[0]:.2f} times DFlash's at position 1, {near:.1f} times in the mean over "
        f"positions 2 to 4 and {far:.1f} times over 2 to 7"
    ) in text
    tau = {label: float(table["tau_teacher"].iloc[-1]) for label, table in ends.items()}
    gains = [100 * (tau["DSpark"] / tau[label] - 1) for label in ("DFlash", "Eagle3")]
    assert "{:.1f} % and {:.1f} % on the text's own tokens, 420,000 anchors each".format(*gains) in text


def test_the_replayed_figures_are_those_of_the_banks() -> None:
    banks = open_banks([f"smollm2-{name}" for name in ("dspark", "dspark-rnn", "dflash", "eagle3", "dspark-t1")])
    found = [acceptance.measure(one) for one in banks]
    lengths = acceptance.length_table(banks, found)
    pairs = acceptance.pair_table(banks, found)
    ratios = pairs[pairs["domain"] == "all"].set_index(["bank", "against", "metric"])

    def tau(name: str) -> str:
        row = lengths[(lengths["bank"] == f"smollm2-{name}") & (lengths["domain"] == "all")].iloc[0]
        return f"{row['tau']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"

    def times(name: str, against: str, metric: str, digits: int, percent: bool = False) -> str:
        row = ratios.loc[(f"smollm2-{name}", f"smollm2-{against}", metric)]
        value, low, high = (100 * (row[key] - 1) if percent else row[key] for key in ("ratio", "low", "high"))
        return f"{value:.{digits}f}{' %' if percent else ' times'} [{low:.{digits}f}, {high:.{digits}f}]"

    text = " ".join(SHIPS.split())
    assert f"{tau('dspark')} replayed" in text
    assert f"RNN head {tau('dspark-rnn')}" in text
    assert f"a tau of {tau('dspark-t1')}" in text
    assert f"replayed {times('dspark-rnn', 'dspark', 'tau', 3)} the Markov head's" in text
    assert (
        f"{times('dspark', 'dflash', 'tau', 1, True)} and {times('dspark', 'eagle3', 'tau', 1, True)} replayed" in text
    )
    positions = ratios.loc[("smollm2-dspark", "smollm2-dflash", "alpha_rest"), "positions"]
    assert f"{times('dspark', 'dflash', 'alpha_rest', 2)} at positions {positions.replace('-', ' to ')}" in text
    assert f"{times('dspark', 'dflash', 'alpha_1', 2)} at position 1" in text
    late = ", ".join(str(count) for count in found[2].blocks[-1, 4:7])
    assert f"get there are {' and '.join(late.rsplit(', ', 1))}" in text


def test_the_study_says_what_its_tables_do() -> None:
    text = " ".join(PAGE.split())

    def taus(name: str, drafter: str) -> list[str]:
        table = pd.read_csv(DATA / name)
        rows = table[(table["drafter"] == drafter) & (table["domain"] == "all")]
        assert (rows["anchors"] // 1000 == 24).all()
        return [f"{tau:.2f}" for tau in rows["tau"]]

    one, two, three = taus("depth.csv", "dspark")
    assert f"DSpark has a tau of {one}, {two} and {three} with 1, 2 and 3 layers" in text
    one, two, three = taus("depth.csv", "dflash")
    assert f"DFlash {one}, {two} and {three}" in text
    assert f"DSpark {', '.join(taus('length.csv', 'dspark'))} with blocks of 3, 5, 7, 10" in text
    assert f"DFlash {', '.join(taus('length.csv', 'dflash'))}, all within" in text
    latency = pd.read_csv(DATA / "latency.csv").set_index(["head", "gamma"])
    shares = latency["head_ms"] / (latency["draft_ms"] + latency["verify_ms"] - latency["head_ms"])
    said = ", ".join(f"{100 * shares['markov', gamma]:.1f} %" for gamma in (3, 5, 7, 10))
    assert f"The Markov head adds {said} to a round with blocks of 3, 5, 7, 10" in text
