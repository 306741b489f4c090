"""Reading prompt files: cells exactly as written, and every fault named with file and line."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data.prompts import PromptTable, read_prompts
from hocket.errors import ConfigError, DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AWKWARD = st.sampled_from(['a "b", c', "two\nlines", "dos\r\nlines", "007", "1e5", "None", "NA", "null", "", "é😀"])
CELL = TEXT | AWKWARD


def write(folder: Path, name: str, text: str, *, encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_text(text, encoding=encoding, newline="")
    return path


def write_jsonl(folder: Path, *rows: object) -> Path:
    return write(folder, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def csv_text(rows: list[list[str]], *, delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue()


def answers(table: PromptTable) -> list[str]:
    return [row.answer for row in table.rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


# --- cells ---


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("name", "delimiter"), [("p.csv", ","), ("p.tsv", "\t"), ("P.CSV", ",")])
def test_a_byte_order_mark_is_not_part_of_the_first_column(
    tmp_path: Path, encoding: str, name: str, delimiter: str
) -> None:
    text = csv_text([["prompt", "answer"], ["1+1", "2"], ["2+2", "4"]], delimiter=delimiter)
    table = read_prompts(write(tmp_path, name, text, encoding=encoding))
    assert table.columns == ("prompt", "answer")
    assert [(row.row, row.prompt, row.answer) for row in table.rows] == [(0, "1+1", "2"), (1, "2+2", "4")]


def test_a_byte_order_mark_in_jsonl(tmp_path: Path) -> None:
    table = read_prompts(write(tmp_path, "p.jsonl", '{"prompt": "hi"}', encoding="utf-8-sig"))
    assert table.rows[0].prompt == "hi"


def test_csv_answers_keep_their_spelling(tmp_path: Path) -> None:
    spelled = ["007", "1e5", "None", "NA", "null", "", " 3 ", "1.0"]
    path = write(tmp_path, "p.csv", csv_text([["prompt", "answer"], *([["q", cell] for cell in spelled])]))
    assert answers(read_prompts(path)) == spelled


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5))
def test_what_csv_writes_is_read_back_exactly(folder: Path, rows: list[tuple[str, str]]) -> None:
    cells = [[f"q{note}", answer, note] for answer, note in rows]
    table = read_prompts(write(folder, "r.csv", csv_text([["prompt", "answer", "note"], *cells])))
    assert [[row.prompt, row.answer, row.columns["note"]] for row in table.rows] == cells
    assert [row.row for row in table.rows] == list(range(len(rows)))


@settings(max_examples=25, deadline=None)
@given(before=st.lists(CELL, max_size=5), after=st.lists(CELL, max_size=2))
def test_the_line_of_a_bad_row_is_right_after_multi_line_cells(
    folder: Path, before: list[str], after: list[str]
) -> None:
    head = csv_text([["prompt", "answer"], *[["q", cell] for cell in before]])
    path = write(folder, "l.csv", head + "q,a,surplus\r\n" + csv_text([["q", cell] for cell in after]))
    line = len(io.StringIO(head, newline=None).read().split("\n"))
    with pytest.raises(DataError, match=rf"l\.csv .*line {line}: 3 cells, where the header has 2"):
        read_prompts(path)


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", "\nprompt,answer\n\na,1\n\n,2\n")
    assert read_prompts(path, on_bad_row="drop").dropped == {"empty_prompt": 1}
    with pytest.raises(DataError, match="line 6: prompt is empty"):
        read_prompts(path)


def test_a_cell_longer_than_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    long = "x" * 200_000
    assert read_prompts(write(tmp_path, "p.csv", f"prompt\n{long}\n")).rows[0].prompt == long


# --- columns ---


@pytest.mark.parametrize(
    ("header", "prompt_key", "answer_key"),
    [
        ("answer,prompt", "prompt", "answer"),
        ("question,answer", "question", "answer"),
        ("problem,solution", "problem", "solution"),
        ("input,prompt", "prompt", None),
        ("instruction,input", "instruction", None),
        ("text,label", "text", "label"),
        (" prompt , answer ", "prompt", "answer"),
        ('""', "", None),
        ("sentence", "sentence", None),
    ],
)
def test_columns_are_found_by_name(tmp_path: Path, header: str, prompt_key: str, answer_key: str | None) -> None:
    cells = ",".join(f"cell of {name.strip()}" for name in header.split(","))
    table = read_prompts(write(tmp_path, "p.csv", f"{header}\n{cells}\n"))
    assert (table.prompt_key, table.answer_key) == (prompt_key, answer_key)
    assert answers(table) == [f"cell of {answer_key}" if answer_key else ""]
    assert f"read p.csv as prompt={prompt_key}, answer={answer_key or '(none)'}" in table.notice
    assert "data.prompt_key / data.answer_key" in table.notice


def test_asked_columns_win_and_all_columns_stay(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", "prompt,answer,b\np,a,007\n")
    (row,) = read_prompts(path, prompt_key="answer", answer_key="b").rows
    assert (row.prompt, row.answer) == ("a", "007")
    assert row.columns == {"prompt": "p", "answer": "a", "b": "007"}
    assert row.reward_columns == {"prompt": "a", "answer": "007", "b": "007"}, "the chosen ones, by their roles"


def test_no_prompt_column_lists_columns_first_row_and_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", "left,right\none,two\n")
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    for part in ("p.csv", "'left', 'right'", '"left": "one"', "data.prompt_key", "data.answer_key"):
        assert part in caught.value.message


@pytest.mark.parametrize("setting", ["prompt_key", "answer_key"])
def test_a_missing_column_names_what_was_asked_found_and_near(tmp_path: Path, setting: str) -> None:
    path = write(tmp_path, "p.csv", "prompt,answer\nq,1\n")
    with pytest.raises(DataError, match=r"'answr'.*'prompt', 'answer'; did you mean answer") as caught:
        read_prompts(path, **{setting: "answr"})
    assert f"data.{setting}" in caught.value.message


def test_dotted_keys_are_found_and_asked(tmp_path: Path) -> None:
    row = {"prompt": "q", "reward_model": {"ground_truth": "42"}, "extra_info": {"level": {"name": "hard"}}}
    path = write_jsonl(tmp_path, row)
    table = read_prompts(path)
    assert (table.answer_key, answers(table)) == ("reward_model.ground_truth", ["42"])
    assert answers(read_prompts(path, answer_key="extra_info.level.name")) == ["hard"]
    assert table.rows[0].columns == row


# --- JSONL ---


@pytest.mark.parametrize(
    ("written", "answer"),
    [("1.0", "1.0"), ("7", "7"), ("1e5", "1e5"), ("-0.10", "-0.10"), ('"007"', "007"), ("true", "true")],
)
@pytest.mark.parametrize("key", ["answer", "reward_model.ground_truth"])
def test_json_answers_keep_their_spelling(tmp_path: Path, written: str, answer: str, key: str) -> None:
    value = f'"answer": {written}' if key == "answer" else f'"reward_model": {{"ground_truth": {written}}}'
    table = read_prompts(write(tmp_path, "p.jsonl", f'{{"prompt": "q", {value}, "tolerance": 0.5}}\n'))
    assert (table.answer_key, answers(table)) == (key, [answer])
    assert table.rows[0].columns["tolerance"] == 0.5


def test_rows_keep_exactly_the_keys_they_were_written_with(tmp_path: Path) -> None:
    call = {"role": "tool", "content": "3", "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, call], "extra_info": {"x": 1}},
        {"messages": [{"role": "user", "content": "ho"}], "extra_info": {"y": None}},
    ]
    table = read_prompts(write_jsonl(tmp_path, *rows))
    assert [row.columns for row in table.rows] == rows
    assert [row.prompt for row in table.rows] == [row["messages"] for row in rows]
    assert table.columns == ("messages", "extra_info")


def test_sharegpt_names_and_the_trailing_assistant_turn(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    table = read_prompts(write_jsonl(tmp_path, {"messages": turns}))
    assert table.rows[0].prompt == [{"role": "user", "content": "2+2?"}]
    assert (table.answer_key, answers(table)) == (None, ["4"])
    assert "answer=(the last assistant turn)" in table.notice
    assert table.rows[0].columns == {"messages": turns}


def test_an_answer_column_wins_over_the_trailing_turn_which_still_is_no_prompt(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    table = read_prompts(write_jsonl(tmp_path, {"messages": turns, "answer": "4"}))
    assert table.rows[0].prompt == turns[:1]
    assert answers(table) == ["4"]


def test_line_separators_inside_json_strings_split_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}')
    assert [row.prompt for row in read_prompts(path).rows] == ["a\u2028b", "c"]


# --- faults of rows ---

BAD_PROMPTS = [
    {"prompt": None},
    {"prompt": []},
    {"prompt": [{"content": "x"}]},
    {"prompt": [{"role": "user", "content": None}]},
    {"prompt": ["x"]},
    {"prompt": "  "},
    {"prompt": 5},
    {"prompt": [{"role": "assistant", "content": "x"}]},
    {"other": "x"},
]


@pytest.mark.parametrize("bad", BAD_PROMPTS, ids=json.dumps)
def test_an_unusable_prompt_names_its_line(tmp_path: Path, bad: object) -> None:
    path = write_jsonl(tmp_path, {"prompt": "q"}, bad)
    with pytest.raises(DataError, match=r"rows\.jsonl has unusable rows \(1 of 2\): line 2: .*on_bad_row=drop"):
        read_prompts(path)
    table = read_prompts(path, on_bad_row="drop")
    assert [row.row for row in table.rows] == [0]
    assert sum(table.dropped.values()) == 1


def test_all_bad_rows_are_named_together_or_counted_by_cause(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"prompt": "q"}, *BAD_PROMPTS[:3], {"prompt": "last"})
    with pytest.raises(DataError, match=r"line 2: .*null.*line 3: .*\[\].*line 4: message 0 .*role"):
        read_prompts(path)
    table = read_prompts(path, on_bad_row="drop")
    assert [row.row for row in table.rows] == [0, 4]
    assert table.dropped == {"empty_prompt": 2, "bad_message": 1}
    assert "rows=2, dropped: 2 empty_prompt, 1 bad_message" in table.notice


def test_many_bad_rows_are_counted_not_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 6: .*; and 4 more"):
        read_prompts(write_jsonl(tmp_path, {"prompt": "q"}, *BAD_PROMPTS))


def test_broken_json_and_other_json_values(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "q"}\n\n{"prompt": \n["q"]\n{"prompt": "r"}\n')
    with pytest.raises(DataError, match=r"line 3: not JSON: .* at column 12; line 4: \[\"q\"\] is not a JSON"):
        read_prompts(path)
    table = read_prompts(path, on_bad_row="drop")
    assert table.dropped == {"broken_json": 1, "not_an_object": 1}
    assert [row.row for row in table.rows] == [0, 3]


@pytest.mark.parametrize("written", ["1" * 5000, "[" * 100_000])
def test_json_that_python_cannot_hold_is_a_bad_row(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, "p.jsonl", f'{{"prompt": "q", "answer": {written}}}')
    with pytest.raises(DataError, match="line 1: "):
        read_prompts(path)


@pytest.mark.parametrize("row", [{"prompt": "q", "answer": None}, {"prompt": "q"}])
def test_a_row_without_the_answer_that_others_have(tmp_path: Path, row: object) -> None:
    path = write_jsonl(tmp_path, {"prompt": "q", "answer": "1"}, row)
    with pytest.raises(DataError, match="line 2: answer is null or absent"):
        read_prompts(path)
    assert read_prompts(path, on_bad_row="drop").dropped == {"missing_answer": 1}


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("p.jsonl", '{"prompt": ""}\n{"prompt": "  "}\n{"prompt": 3}\n', "2 empty_prompt, 1 bad_prompt"),
        ("p.jsonl", "{\n{\n", "2 broken_json"),
        ("p.csv", "prompt,answer\nx\ny\n", "2 wrong_cell_count"),
    ],
)
def test_nothing_left_names_the_counts(tmp_path: Path, name: str, text: str, counts: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(DataError, match=rf"nothing is left of .*{name}: dropped {counts}"):
        read_prompts(path, on_bad_row="drop")


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'skip'; it must be 'error' or 'drop'"):
        read_prompts(write(tmp_path, "p.csv", "prompt\nx\n"), on_bad_row="skip")  # pyright: ignore


# --- faults of files ---


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "", "holds no prompts"),
        ("p.jsonl", "\n", "holds no prompts"),
        ("p.csv", "prompt,answer\n", "holds no prompts"),
        ("p.csv", 'prompt\nfine\n"two\nlines"\n"open\nq\n', "line 5: a quote is never closed"),
        ("p.csv", 'prompt\n"shut"early\n', "line 2: broken quoting"),
        ("p.csv", "prompt,answer,answer\na,b,c\n", "line 1: the header has 'answer' more than once"),
        ("p.csv", "prompt;answer\na;b\n", "line 1: 'prompt;answer' looks like several columns"),
        ("p.jsonl", "{}\n", "which column is the prompt. Found no columns"),
        ("p.txt", "hi\n", r"ending '.txt'; hocket reads .csv, .tsv, .jsonl"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_fault_of_the_whole_file_is_always_an_error(
    tmp_path: Path, name: str, text: str, message: str, on_bad_row: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        read_prompts(path, on_bad_row=on_bad_row)  # pyright: ignore[reportArgumentType]


def test_bytes_that_are_not_utf8_name_offset_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"p\.csv, line 2: byte 0xe9 at offset 13 is not UTF-8"):
        read_prompts(path)


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "digits.csv", "prompt\nx\n")
    with pytest.raises(DataError, match=r"digit\.csv does not exist; did you mean digits\.csv"):
        read_prompts(tmp_path / "digit.csv")
    with pytest.raises(DataError, match="neither does its folder"):
        read_prompts(tmp_path / "nowhere" / "digit.csv")


def test_a_directory_names_the_files_inside(tmp_path: Path) -> None:
    write(tmp_path, "digits.csv", "prompt\nx\n")
    with pytest.raises(DataError, match=r"is a directory; name one file of it \(digits\.csv\)"):
        read_prompts(tmp_path)
