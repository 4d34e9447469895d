"""A benchmark goes on where it was stopped."""

from pathlib import Path

from journal import add_row, read_rows


def test_a_line_cut_short_is_taken_out_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    assert read_rows(path) == []
    add_row(path, {"case": 1})
    add_row(path, {"case": 2})
    path.write_text(path.read_text()[:-4])
    assert read_rows(path) == [{"case": 1}]
    add_row(path, {"case": 3})
    assert read_rows(path) == [{"case": 1}, {"case": 3}]
