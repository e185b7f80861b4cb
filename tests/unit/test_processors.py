"""The numeric tests that run as on other processors are where the list says."""

from processors import LONG, QUICK, ROOT


def test_all_listed_tests_exist() -> None:
    assert [name for name in (*QUICK, *LONG) if not (ROOT / "tests" / name).exists()] == []
