"""The script that runs the numerical tests under other kernels tells a failure from a success."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernels

NATIVE = kernels.SETTINGS[0]


def test_a_setting_has_its_own_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = kernels.environment(kernels.Setting("x", "", {"ATEN_CPU_CAPABILITY": "default"}))
    assert env["ATEN_CPU_CAPABILITY"] == "default"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "MKL_CBWR" not in env


def test_every_suite_is_there() -> None:
    assert all((kernels.TESTS / name).exists() for name in kernels.NUMERICAL)
    assert set(kernels.NEAREST) <= set(kernels.NUMERICAL)
    assert set(kernels.SHORT) <= {setting.name for setting in kernels.SETTINGS}


@pytest.mark.full
def test_a_failing_test_is_a_failure_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_good():\n    pass\n")
    assert kernels.run(NATIVE, [str(test)], jobs=1) == (True, "1 passed")
    test.write_text("def test_good():\n    pass\n\ndef test_bad():\n    assert 1 > 2\n")
    assert kernels.run(NATIVE, [str(test)], jobs=1) == (False, "1 failed, 1 passed")
    assert "assert 1 > 2" in capsys.readouterr().out


@pytest.mark.full
def test_what_changes_nothing_is_not_run() -> None:
    native, _ = kernels.probe(NATIVE)
    good, row = kernels.judge(
        kernels.Setting("same", "nothing", {}), native, ["nowhere.py"], jobs=1
    )
    assert good
    assert row.tests == "not run: it changes nothing here"
    assert row.seen.endswith("other bits in: nothing")
