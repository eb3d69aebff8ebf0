"""The validation frame: predictions and their errors by hand, the shipped page and README against their tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dsim.errors import InputError
from experiments import _validate_b300, _validate_here, validate
from experiments._b300_flash import SHOWN
from experiments._common import run_main
from experiments._engine_runs import open_measurement
from experiments._validate import (
    anchor,
    bootstrap_interval,
    draw_errors,
    error_summary,
    markdown,
    page,
    percent,
    predictions,
    readable_summary,
)
from experiments._validate_b300 import largest_changes

ROOT = Path(__file__).parents[2]


def row(**changes):
    return {
        "case": "c",
        "arm": "a",
        "load": "1",
        "metric": "tpot_p50_ms",
        "unit": "ms",
        "predicted": 11.0,
        "measured": 10.0,
        "use": "scored",
        "target": 0.05,
        "n_scored": 7,
        "cost_source": "x",
        "extrapolated": False,
    } | changes


def three():
    return predictions(
        [
            row(),
            row(load="2", predicted=19.4, measured=20.0),
            row(load="3", predicted=50.0, use="fitted"),
            row(load="4", measured=np.nan, use="unknown"),
            row(metric="throughput_tok_s", unit="tok/s", predicted=90.0, measured=100.0, target=np.nan),
        ]
    )


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: validate.main(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_errors_are_of_the_prediction_and_unknown_where_nobody_measured():
    table = three()
    assert table["error"].tolist()[:2] == pytest.approx([0.1, -0.03])
    assert np.isnan(table["error"][3])
    assert set(table["drafts_source"]) == {"none"}


def test_summary_counts_scored_rows_only():
    summary = error_summary(three()).set_index("metric")
    assert summary.loc["tpot_p50_ms", ["n", "within", "n_target"]].tolist() == [2, 1, 2]
    assert summary.loc["tpot_p50_ms", ["median", "worst", "target"]].tolist() == pytest.approx([0.065, 0.1, 0.05])
    assert summary.loc["tpot_p50_ms", "worst_load"] == "1"
    assert summary.loc["all", ["n", "within", "n_target"]].tolist() == [3, 1, 2]
    assert summary.loc["all", ["median", "worst"]].tolist() == pytest.approx([0.1, 0.1])
    shown = readable_summary(error_summary(three()))["within target"].tolist()
    assert shown == ["1 of 2 (<= 5 %)", "-", "1 of 2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(use="guessed")], "'use'.*got 'guessed'"),
        ([row(predicted=0.0)], "'predicted'.*got 0.0"),
        ([row(predicted=np.nan)], "'predicted'"),
        ([row(measured=np.nan)], "'measured'.*none where it is unknown"),
        ([row(use="unknown")], "'measured'.*got 10.0"),
        ([row(target=0.0)], "'target'.*got 0.0"),
        ([row(), row()], "predicted twice"),
        ([row(extra=1)], "'extra'.*expected one of"),
        ([{k: v for k, v in row().items() if k != "cost_source"}], "'cost_source'.*a value in every row"),
    ],
)
def test_rows_that_are_no_predictions_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        predictions(rows)


def test_bootstrap_interval_of_a_percentile():
    values = np.arange(1.0, 151.0)
    low, high = bootstrap_interval(values, 50)
    # The median of 150 evenly spread values moves by about 1.96 x 150 / (2 sqrt(150)) = 12.
    assert low == pytest.approx(75.5 - 12, abs=2)
    assert high == pytest.approx(75.5 + 12, abs=2)
    assert bootstrap_interval(values, 50) == (low, high)


def test_texts():
    assert [percent(v, sign=True) for v in (0.1234, -0.0004, np.nan)] == ["+12.3 %", "0.0 %", "-"]
    assert anchor("Four vLLM runs, no speculation") == "four-vllm-runs-no-speculation"
    table = pd.DataFrame({"a": ["x", "y"], "b": [1234.5, np.nan], "c": [0.01234, 7.0], "n": [3, 4]})
    assert markdown(table).splitlines() == [
        "| a | b | c | n |",
        "|---|---|---|---|",
        "| x | 1,234 | 0.01234 | 3 |",
        "| y |  | 7.000 | 4 |",
    ]
    with pytest.raises(InputError, match=r"a text without '\|'"):
        markdown(pd.DataFrame({"|error|": [1]}))


def test_the_figure_is_drawn_from_the_table_alone(tmp_path):
    draw_errors(three(), tmp_path, "errors", title="t", note="n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["errors.png", "errors.svg"]


def test_the_largest_changes_are_those_that_move_any_number_most():
    others = {f"{name}_{users}": 100.0 for name, users in SHOWN}
    rows = [
        {"variant": "full", "k1_worst_error": 0.10, **others},
        {"variant": "little", "k1_worst_error": 0.11, **others},
        {"variant": "an-arm", "k1_worst_error": 0.10, **others, "k7_128": 60.0},
        {"variant": "nothing", "k1_worst_error": 0.10, **others},
        {"variant": "errors", "k1_worst_error": 0.35, **others},
    ]
    found = largest_changes(pd.DataFrame(rows), 3)
    assert found["variant"].tolist() == ["an-arm", "errors", "little"]


def test_the_mechanisms_that_matter_most_are_drawn_and_values_beyond_the_axis_are_written(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(_validate_b300, "save_figure", lambda fig, _folder, stem: drawn.update({stem: fig}))
    tables = dict(validate.shipped()["vllm-b300-flash"][1])
    _validate_b300.draw_case(tables, tmp_path, "x")
    left, right = drawn["x-mechanisms"].axes
    assert len(left.get_yticks()) == _validate_b300.SHOWN_CHANGES < len(tables["ablation"]) - 1
    assert not left.texts
    assert not right.texts  # all marks are inside
    table = tables["ablation"].copy()
    table.loc[table["variant"] == "no-host", ["k1_worst_error", "k7_128"]] *= [5.0, 4.0]
    _validate_b300.draw_case(tables | {"ablation": table}, tmp_path, "x")
    left, right = drawn["x-mechanisms"].axes
    assert [text.get_text() for text in left.texts] == ["+223 %"]
    assert len(right.texts) == 1
    assert max(bar.get_width() for bar in left.patches) == left.get_xlim()[1] == 100


# -- what is shipped -------------------------------------------------------------------------------------


def test_the_page_is_the_one_that_the_tables_make():
    found = validate.shipped()
    assert found
    assert (ROOT / "docs" / "validation.md").read_text(encoding="utf-8") == page(found)


def test_readme_quotes_the_headline():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert validate.with_headline(text, validate.headline(validate.shipped())) == text
    assert validate.MARKS[0] in text


def test_shipped_tables_are_predictions_and_meet_what_was_asked():
    for name, (_, tables) in validate.shipped().items():
        table = tables["validation"]
        again = predictions(table.drop(columns="error").to_dict("records"))
        assert again["error"].to_numpy() == pytest.approx(table["error"].to_numpy(), nan_ok=True)
        assert set(table["case"]) == {name}
    overall = error_summary(validate.shipped()["vllm-four-runs"][1]["validation"]).set_index("metric").loc["all"]
    assert (overall["within"], overall["n_target"]) == (12, 12)


@pytest.mark.parametrize(("arm", "users"), [("none", 1), ("fixed:k=3", 4), ("dspark", 16)])
def test_the_shipped_measurement_is_predicted_as_its_table_says(arm, users):
    found = open_measurement(_validate_here.SHIPPED)
    runs = found.runs[(found.runs["arm"] == arm) & (found.runs["users"] == users)]
    assert len(runs) == found.measured.rounds > 1
    table = pd.DataFrame([_validate_here.predict(found, _validate_here.Cell(arm, users, n)) for n in runs["round"]])
    again = _validate_here.compared(runs, table).iloc[0]
    cells = validate.shipped()["here"][1]["cells"]
    known = cells[(cells["arm"] == arm) & (cells["users"] == users)].iloc[0]
    for name in _validate_here.METRICS:
        assert again[name] == pytest.approx(known[name])
        # Another processor may round a price and a policy's decision otherwise.
        assert again[f"{name}_predicted"] == pytest.approx(known[f"{name}_predicted"], rel=0.005)
    assert again["luck"] == pytest.approx(known["luck"], rel=0.2)
    assert not known["extrapolated"]


def test_docs_are_written_from_tables(tmp_path):
    docs = tmp_path / "docs"
    for file in (ROOT / "docs" / "validation").glob("*/*.csv"):
        folder = docs / "validation" / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(file.read_bytes())
    marks = "\n".join(validate.MARKS)
    (tmp_path / "README.md").write_text(f"# x\n\n{marks}\n\nend\n", encoding="utf-8")
    validate.write_docs(docs)
    assert (docs / "validation.md").read_bytes() == (ROOT / "docs" / "validation.md").read_bytes()
    for stem in (
        "vllm-four-runs",
        "vllm-four-runs-distributions",
        "vllm-b300-flash",
        "vllm-b300-flash-mechanisms",
        "here",
    ):
        assert (docs / "figures" / f"validation-{stem}.png").is_file()
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert validate.headline(validate.shipped()) in readme
    assert readme.endswith(f"{validate.MARKS[1]}\n\nend\n")


def test_no_tables_no_page(tmp_path):
    with pytest.raises(InputError, match="no case has tables"):
        validate.write_docs(tmp_path / "docs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of the arguments --case --docs is required"),
        (("--case", "nothing"), "invalid choice: 'nothing'"),
        (("--docs", "--quick"), "'--quick'"),
        (("--docs", "--out", "x"), "'--out': got 'x'"),
        (("--case", "vllm-four-runs", "--ship", "--quick"), "'--ship'"),
        (("--case", "vllm-four-runs", "--docs"), "not allowed with argument"),
        (("--case", "vllm-four-runs", "--jobs", "0"), "expected an integer >= 1"),
    ],
)
def test_bad_options_are_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
