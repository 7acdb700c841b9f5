"""The comparison with other engines: what counts as a run, what a row says, and engines that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peers import Case, Places

REQUESTS = [{"prompt": [1], "max_tokens": 2, "output": [5, 6]}, {"prompt": [2], "max_tokens": 2, "output": [7, 8]}]
CASE = Case("ours", "ours", "driver", "fp32", 16)
GOOD = {
    "seconds": 2.0,
    "tokens": [[5, 6], [7, 8]],
    "ttft": [0.5, 1.5],
    "others_cores": 0.0,
    "peak_mb": 100.4,
    "versions": {},
}


def result(**changes: Any) -> dict[str, Any]:
    """A run's answer."""
    return {**GOOD, **changes}


def test_a_row_holds_medians_and_counts_equal_answers() -> None:
    """Of three runs: tokens a second of the middle one, the extremes, the highest memory; the last run's tokens."""
    runs = [result(seconds=1.0), result(seconds=4.0, peak_mb=300), result(tokens=[[5, 6], [7, 9]])]
    row = peers.row(CASE, runs, REQUESTS)
    assert (row["tokens_per_s"], row["lowest"], row["highest"]) == (2.0, 1.0, 4.0)
    assert (row["equal"], row["peak_mb"], row["mean_ttft_s"], row["runs"]) == (1, 300, 1.0, 3)


def test_a_row_of_an_engine_that_never_ran_says_why() -> None:
    """The reason in place of figures; and one good run is enough for figures."""
    assert peers.row(CASE, [{"error": "no such thing"}], REQUESTS)["error"] == "no such thing"
    assert peers.row(CASE, [{"error": "once"}, result()], REQUESTS)["tokens_per_s"] == 2.0


@pytest.mark.parametrize(("others", "kept"), [([0.0, 9.0, 9.0], 0.0), ([0.5, 0.1, 9.0], 0.1), ([0.5, 0.3, 0.4], 0.3)])
def test_disturbed_runs_are_repeated(monkeypatch: pytest.MonkeyPatch, others: list[float], kept: float) -> None:
    """Up to three times; where it never was quiet, the quietest counts, and its figure shows it."""
    answers = iter(result(others_cores=cores) for cores in others)
    monkeypatch.setattr(peers, "run", lambda *_: next(answers))
    assert peers.quiet_run(CASE, Places(Path()), REQUESTS)["others_cores"] == kept


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('of no use')", "of no use"),
        ("print('rubbish')", "exit status 0"),
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_an_engine_that_fails_is_an_error_in_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    """It crashes, prints rubbish, or hangs: the other engines go on."""
    (tmp_path / "driver.py").write_text(script)
    monkeypatch.setattr(peers, "DRIVERS", tmp_path)
    monkeypatch.setattr(peers, "TIMEOUT", 2)
    assert said in peers.run(CASE, Places(tmp_path), REQUESTS)["error"]


def test_a_driver_answers_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the engine prints: the line that counts is the driver's own."""
    protocol = Path(peers.__file__).parent / "drivers" / "protocol.py"
    (tmp_path / "protocol.py").write_text(protocol.read_text())
    (tmp_path / "driver.py").write_text(
        "from protocol import main\n"
        "def load(settings):\n"
        "    def serve(requests, start):\n"
        "        print('noise')\n"
        "        return {n: r['output'] for n, r in enumerate(requests)}, {0: 0.25}\n"
        "    return serve, {'engine': '1'}\n"
        "main(load)\n"
    )
    monkeypatch.setattr(peers, "DRIVERS", tmp_path)
    answer = peers.run(CASE, Places(tmp_path), REQUESTS)
    assert answer["tokens"] == [[5, 6], [7, 8]]
    assert answer["ttft"] == [0.25, None]
    assert answer["versions"] == {"engine": "1"}
    assert answer["peak_mb"] > 1


def test_the_short_form_is_one_object() -> None:
    """Speeds by name, and how many requests of ours had equal tokens."""
    other = Case("transformers continuous", "transformers", "hugging", "fp32", 8)
    rows = [
        peers.row(Case("contbatch", "ours", "ours", "fp32", 8), [result(seconds=1.0)], REQUESTS),
        peers.row(other, [result()], REQUESTS),
    ]
    answer = json.loads(json.dumps(peers.short(rows)))
    assert (answer["ours"], answer["transformers"], answer["equal"]) == (4.0, 2.0, 2)


def test_every_case_has_its_driver() -> None:
    """Drivers are there, and the cases of a run have different names."""
    chosen = list(peers.cases([16, 32], ["fp32", "bf16"]))
    assert len({case.key for case in chosen}) == len(chosen)
    for case in chosen:
        assert (peers.DRIVERS / f"{case.driver}.py").is_file(), case
