from pathlib import Path

from exl2flow.tasks.tags import tag_run


def test_tags_outside_a_run_are_dropped() -> None:
    tag_run(Path("model"), "4bpw")
