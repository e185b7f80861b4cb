"""What stops a user's Parquet file from being calibration text."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exl2flow.core.errors import CalibrationError
from exl2flow.quant.tokenize.parquet import check_parquet


def test_two_columns_of_one_name_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "text.parquet"
    columns = [pa.array(["one"]), pa.array(["two"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), path)

    with pytest.raises(CalibrationError, match="more than one column named `text`; rename"):
        check_parquet(path)
