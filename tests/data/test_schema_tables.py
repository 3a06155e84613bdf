"""Tables with text for training: by a schema, and by the names that the outcome has had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from console import fedsso as command
from fedsso import Federation, load
from fedsso.errors import InputError
from fedsso.regression.schema import Column, Schema, write

SCHEMA = Schema(
    "ill",
    (
        Column("age", "number", unit="years"),
        Column("stage", "category", levels=("I", "II", "III")),
        Column("patient", "ignore"),
    ),
    positive="sick",
    negative="well",
)
ROWS = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two hospitals with columns in different orders, one with an additional column and gaps."""
    north = ["patient,age,stage,ill"]
    south = ["ward;ill;stage;age"]
    for i in range(ROWS):
        stage = ("I", "II", "III")[i % 3]
        ill = ("well", "sick")[i % 2]
        age = "NA" if i == 5 else str(40 + i)
        north.append(f"p{i},{age},{stage},{ill}")
        south.append(f"{'ab'[i % 2]};{ill};{stage};{60 + i},5")
    (tmp_path / "north.csv").write_text("\n".join(north))
    (tmp_path / "south.csv").write_text("\n".join(south))
    (tmp_path / "schema.toml").write_text(write(SCHEMA))
    return tmp_path


def test_text_becomes_columns(folder: Path) -> None:
    fed = Federation.from_csv(folder, schema=folder / "schema.toml", test_fraction=0)
    assert fed.client_names == ("north", "south")
    assert fed.train_sizes.tolist() == [ROWS - 1, ROWS]
    assert fed.class_names == ("well", "sick")
    assert fed.notes == (f"north.csv: 1 of {ROWS} rows are left out because of missing values",)
    assert fed.scaling is not None
    assert fed.scaling.columns == ("age", "stage: II", "stage: III")
    assert fed.scaling.units == ("years", "", "")
    # The eighth row of south: age 67.5, stage II, sick.
    row = fed.scaling([[67.5, 1, 0]])[0]
    place = (fed.x == row).all(1).nonzero().flatten()
    assert fed.y[place].tolist() == [1]
    same = Federation.from_csv(folder, "ill", schema=SCHEMA, test_fraction=0)
    assert same.digest() == fed.digest()


def test_a_named_federation_is_made_again_from_its_source(folder: Path) -> None:
    fed = load("csv", files=folder, schema=folder / "schema.toml")
    assert load(**dict(fed.source)).digest() == fed.digest()  # type: ignore[arg-type]


def test_gaps_may_have_an_indicator(folder: Path) -> None:
    columns = (Column("age", "number", fill=50.0),)
    schema = Schema("ill", columns, positive="sick", missing="median")
    fed = Federation.from_csv(folder, schema=schema, test_fraction=0)
    assert fed.train_sizes.tolist() == [ROWS, ROWS]
    assert fed.scaling is not None
    assert fed.scaling.columns == ("age", "age: missing")
    assert fed.notes == ()


def test_a_column_may_name_the_client(folder: Path) -> None:
    only = [folder / "south.csv"]
    fed = Federation.from_csv(only, schema=SCHEMA, group="ward", test_fraction=0)
    assert fed.client_names == ("a", "b")
    with pytest.raises(InputError, match="unknown column 'wards'; did you mean 'ward'"):
        Federation.from_csv(only, schema=SCHEMA, group="wards")


def test_outcomes_are_labels_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,word,dose,kind\n1,Yes,0.5,x\n2,n,1.5,y\n3,y,2,z\n")
    columns = (Column("a", "number"),)

    def of(outcome: str) -> Federation:
        return Federation.from_csv([path], schema=Schema(outcome, columns), test_fraction=0)

    words = of("word")
    assert (words.y.tolist(), words.labels) == ([1, 0, 1], ("no", "yes"))
    doses = of("dose")
    assert (doses.classes, sorted(doses.y.tolist())) == (0, [0.5, 1.5, 2.0])
    assert of("kind").labels == ("x", "y", "z")


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="outcome is 'stage', and 'ill' in the schema"):
        Federation.from_csv(folder, "stage", schema=SCHEMA)
    with pytest.raises(InputError, match="features is for tables without a schema"):
        Federation.from_csv(folder, schema=SCHEMA, features=["age"])
    with pytest.raises(InputError, match="missing is for tables without a schema"):
        Federation.from_csv(folder, schema=SCHEMA, missing=["-9"])
    (folder / "east.csv").write_text("age,stage,ill\nNA,I,sick\n,II,well\n")
    with pytest.raises(InputError, match=r"east\.csv: none of 2 rows can be used"):
        Federation.from_csv(folder, schema=SCHEMA)
    (folder / "east.csv").write_text("age,stage,ill\n50,IV,sick\n")
    with pytest.raises(InputError, match=r"east\.csv: line 2: has 'IV'") as caught:
        Federation.from_csv(folder, schema=SCHEMA)
    assert "IV" not in caught.value.public


def test_the_former_name_of_the_outcome_is_understood(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{i % 2}" for i in range(16))
    (tmp_path / "a.csv").write_text(f"age,ill\n{rows}\n")
    now = load("csv", files=tmp_path, outcome="ill")
    before = load("csv", files=tmp_path, target="ill")
    assert before.digest() == now.digest()
    assert before.source == now.source
    keyword = Federation.from_csv(tmp_path, target="ill")
    assert np.array_equal(keyword.y, now.y)
    with pytest.raises(InputError, match="outcome and its former name target are both given"):
        load("csv", files=tmp_path, outcome="ill", target="ill")


def test_the_command_line_knows_all_names(folder: Path) -> None:
    small = ("--rounds", 1, "--device", "cpu", "--dataset", "csv", "--files", folder / "north.csv")
    shown = command("run", *small, "--schema", folder / "schema.toml").stderr
    assert "sample 3 float32, 2 classes" in shown
    for name in ("--outcome", "--column", "--target"):
        told = command("run", *small, name, "il", code=2).stderr
        assert "unknown column 'il'; did you mean 'ill'" in told
    config = folder / "settings.toml"
    config.write_text(f'[data]\ndataset = "csv"\nfiles = ["{folder}/north.csv"]\ntarget = "il"\n')
    assert "did you mean 'ill'" in command("run", "--config", config, code=2).stderr
    told = command("sweep", *small, "--outcome", "il", code=2).stderr
    assert "unknown column 'il'" in told
