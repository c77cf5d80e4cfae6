"""What is read from files: JSONL of two kinds, and what two versions of OpenClaw really wrote."""

import errno
import json
import os
import sqlite3
from pathlib import Path

import pytest

from openclaw_rl.openclaw.sessions import histories
from openclaw_rl.replay.files import ReplayError, check, find, read

FIXTURES = Path(__file__).parent.parent / "fixtures" / "openclaw_sessions"
USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def said(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


def test_one_conversation_a_line(tmp_path):
    tool = {"type": "function", "function": {"name": "f"}}
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [USER, REPLY], "tools": [tool], "session_id": "s"},
        "",
        [USER],
    )
    first, second = read(path)
    assert said(first) == [("user", "q"), ("assistant", "a")]
    assert (first.tools, first.session_id, first.where) == ((tool,), "s", f"{path}:1")
    assert (said(second), second.where) == ([("user", "q")], f"{path}:3")


def test_one_message_a_line(tmp_path):
    (only,) = read(write(tmp_path / "a.jsonl", USER, REPLY, USER))
    assert len(only.messages) == 3
    one, two = read(write(
        tmp_path / "b.jsonl", {**USER, "session_id": "x"}, {**USER, "session_id": "y"},
        {**REPLY, "session_id": "x"},
    ))  # fmt: skip
    assert (one.session_id, said(one)) == ("x", [("user", "q"), ("assistant", "a")])
    assert (two.session_id, said(two)) == ("y", [("user", "q")])


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (({"messages": [USER]}, "{bad", [USER]), ":2", "is not JSON"),
        (({"text": "secret"},), ":1", "must be"),
        (({"messages": [USER, "secret"]},), ":1", "messages[1]: must be an object"),
        ((USER, {"role": "robot", "content": "secret"}), ":2", "role: must be 'system'"),
        ((USER, {"content": "secret"}), ":2", "a message with a role"),
        (({"messages": [USER], "tools": "secret"},), ":1", "tools must be a list"),
        (("7",), ":1", "must be"),
    ],
)
def test_a_mistake_is_told_by_file_and_line_without_the_text(tmp_path, lines, where, words):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ReplayError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}{where}: ")
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_image_ends_what_is_read_of_its_conversation_and_of_no_other(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    seen = {"role": "user", "content": [{"type": "text", "text": "this"}, image]}
    path = write(tmp_path / "a.jsonl", [USER, REPLY, seen, REPLY, USER, REPLY], [USER, REPLY])
    first, second = read(path)
    assert said(first) == [("user", "q"), ("assistant", "a")]
    assert (first.left_out, len(second.messages)) == ({"image": 2}, 2)
    (only,) = read(write(tmp_path / "b.jsonl", seen, REPLY, USER))
    assert (only.messages, only.left_out) == ((), {"image": 1})


def test_a_linked_folder_is_read_once_and_a_circle_ends(tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    write(tmp_path / "elsewhere" / "deep" / "a.jsonl", [USER])
    data = tmp_path / "data"
    data.mkdir()
    (data / "one").symlink_to(tmp_path / "elsewhere")
    (data / "two").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(data)
    assert [path.name for path in find(data)] == ["a.jsonl"]


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def refuse(path):  # what the system says to anybody but root
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ReplayError, match="locked: cannot be read: Permission denied"):
        find(tmp_path)


def test_a_last_line_that_is_still_written_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps([USER]) + '\n[{"role": "us')
    assert len(list(read(path))) == 1


def test_what_openclaw_2026_3_23_wrote():
    """Recorded: two plain turns and a tool loop of two hops."""
    (past,) = read(FIXTURES / "v2026.3.23-2.jsonl")
    assert past.session_id == "a988d7d2-4c45-46f7-8bb8-ea0439902b06"
    assert [m["role"] for m in past.messages] == [
        "user", "assistant", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert said(past)[:3] == [("user", "hello one"), ("assistant", "reply 1"),
                              ("user", "use the tool")]  # fmt: skip
    call = past.messages[3]["tool_calls"][0]
    assert past.messages[3]["content"] is None
    assert json.loads(call["function"]["arguments"]) == {"command": "echo hop-one"}
    assert past.messages[4] == {"role": "tool", "tool_call_id": call["id"], "content": "hop-one"}


def test_what_openclaw_2026_9_6_wrote(tmp_path):
    """Recorded: the same, in SQLite, and then a reset."""
    rows = [json.loads(line) for line in (FIXTURES / "v2026.9.6.jsonl").read_text().splitlines()]
    folder = tmp_path / "agents" / "main" / "agent"
    folder.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "other.jsonl", "no conversation")
    with sqlite3.connect(folder / "openclaw-agent.sqlite") as db:
        db.execute("CREATE TABLE transcript_events (session_id, seq, event_json, event_zstd)")
        for row in rows:
            values = (row["session_id"], row["seq"], json.dumps(row["event_json"]))
            db.execute("INSERT INTO transcript_events VALUES (?, ?, ?, NULL)", values)
        db.execute("INSERT INTO transcript_events VALUES ('z', 0, NULL, x'00')")
    db.close()
    (path,) = find(tmp_path)
    past, packed = read(path)
    assert [m["role"] for m in past.messages] == [
        "user", "assistant", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert packed.left_out == {"compressed_session": 1}


def entries(*given):
    """Entries that follow each other; a dict may name another parent."""
    made = [{"type": "session", "id": "s", "version": 3}]
    last = None
    for number, entry in enumerate(given):
        made.append({"id": f"e{number}", "parentId": last, **entry})
        last = made[-1]["id"]
    return made


def message(role, text, **more):
    content = [{"type": "text", "text": text}]
    return {"type": "message", "message": {"role": role, "content": content, **more}}


def test_the_last_entry_says_which_branch_is_meant():
    (past,) = histories(
        entries(message("user", "a"), message("assistant", "b"), message("user", "wrong"),
                message("assistant", "worse"), {**message("user", "right"), "parentId": "e1"}),
    )  # fmt: skip
    assert said(past) == [("user", "a"), ("assistant", "b"), ("user", "right")]
    (back,) = histories(
        entries(message("user", "a"), message("assistant", "b"), message("user", "wrong"),
                {"type": "leaf", "targetId": "e1"}, message("user", "right")),
    )  # fmt: skip
    assert said(back) == said(past)


def test_case_15_a_compaction_begins_another_conversation():
    before, after = histories(
        entries(message("user", "a"), message("assistant", "b"), message("user", "c"),
                message("assistant", "d"),
                {"type": "compaction", "summary": "SUM", "firstKeptEntryId": "e2"},
                message("user", "e"), message("assistant", "f")),
    )  # fmt: skip
    assert [text for _, text in said(before)] == ["a", "b", "c", "d"]
    assert "SUM" in said(after)[0][1]
    assert [text for _, text in said(after)][1:] == ["c", "d", "e", "f"]
    assert after.begin == 3  # what was kept is history there: its replies are in the first one


def test_case_50_a_link_that_names_nothing_ends_one_conversation_and_begins_another():
    one, two = histories(
        entries(message("user", "a"), message("assistant", "b"),
                {**message("user", "c"), "parentId": "gone"}, message("assistant", "d")),
    )  # fmt: skip
    assert said(one) == [("user", "a"), ("assistant", "b")]
    assert said(two) == [("user", "c"), ("assistant", "d")]
    assert (dict(one.left_out), dict(two.left_out)) == ({}, {"broken_link": 1})


def test_case_50_an_unreadable_line_of_a_session_is_left_out_and_counted(tmp_path):
    made = entries(
        message("user", "a"), message("assistant", "b"), message("user", "c"),
        message("assistant", "d"), message("user", "e"), message("assistant", "f"),
    )  # fmt: skip
    lines = [json.dumps(entry) for entry in made]
    lines[3] = lines[3].replace('"c"', '"c\x01"')  # raw, which JSON does not allow
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    lost, one, two = read(tmp_path / "s.jsonl")
    assert (lost.where, lost.left_out) == (f"{tmp_path / 's.jsonl'}:4", {"unreadable_line": 1})
    assert said(one) == [("user", "a"), ("assistant", "b")]
    assert said(two) == [("assistant", "d"), ("user", "e"), ("assistant", "f")]
    assert two.left_out == {"broken_link": 1}
    check([tmp_path / "s.jsonl"])


def test_what_is_no_models_reply_is_counted_and_images_end_the_history(tmp_path):
    path = write(
        tmp_path / "s.jsonl",
        *entries(
            message("user", "a"),
            message("assistant", "half", stopReason="aborted"),
            message("assistant", "mirror", model="delivery-mirror"),
            message("assistant", "b"),
            {"type": "message", "message": {"role": "user", "content": [{"type": "image"}]}},
            message("assistant", "c"),
        ),
    )
    (past,) = read(path)
    assert said(past) == [("user", "a"), ("assistant", "b")]
    assert past.left_out == {"failed_reply": 1, "not_a_model": 1, "image": 1}


def test_a_missing_path_and_an_empty_folder(tmp_path):
    with pytest.raises(ReplayError, match="no such file"):
        find(tmp_path / "x")
    assert find(tmp_path) == []


HEADER = {"type": "session", "id": "s"}


def entry_of(content, role="user"):
    return {"type": "message", "id": "1", "message": {"role": role, "content": content}}


@pytest.mark.parametrize(
    "entry",
    [
        entry_of(["x"]),
        entry_of(["x"], "assistant"),
        entry_of(5, "assistant"),
        entry_of([{"type": "text", "text": 5}]),
        entry_of([{"type": "thinking", "thinking": [1]}], "assistant"),
        {**entry_of("x"), "parentId": [1]},
        {"type": "leaf", "id": "2", "targetId": {"a": 1}},
    ],
)
def test_a_session_with_fields_of_other_kinds_is_refused_by_name(tmp_path, entry):
    path = tmp_path / "s.jsonl"
    path.write_text(f"{json.dumps(HEADER)}\n{json.dumps(entry)}\n")
    with pytest.raises(ReplayError, match=r"s\.jsonl:1: is not a session"):
        list(read(path))


@pytest.mark.parametrize("event", ["{", "[1]", 5, b"\xff\xfe", "[" * 100_000])
def test_an_event_that_is_none_is_refused_by_name(tmp_path, event):
    path = tmp_path / "openclaw-agent.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE transcript_events (session_id, seq, event_json)")
    db.execute("INSERT INTO transcript_events VALUES ('s', 1, ?)", (event,))
    db.commit()
    db.close()
    with pytest.raises(ReplayError, match="sqlite:s: an e"):
        list(read(path))


def test_a_last_line_torn_within_a_character_is_left_and_others_are_not(tmp_path):
    path = tmp_path / "talk.jsonl"
    line = json.dumps([{"role": "user", "content": "x"}]).encode() + b"\n"
    path.write_bytes(b"\xef\xbb\xbf" + line + line + b'[{"role":"user","content":"\xc3')
    assert len(list(read(path))) == 2
    path.write_bytes(b'[{"role":"user","content":"\xc3"}]\n' + line)
    with pytest.raises(ReplayError, match=r"talk\.jsonl:1: is not JSON"):
        list(read(path))


@pytest.mark.parametrize("first", ['{"type":"session","id":"s"}\n', ""])
def test_half_characters_are_made_whole(tmp_path, first):
    path = tmp_path / "talk.jsonl"
    message = r'{"role":"user","content":"a\ud83d"}'
    entry = f'{{"type":"message","id":"1","message":{message}}}' if first else message
    path.write_text(first + entry + "\n")
    (talk,) = read(path)
    assert talk.messages[0]["content"] == "a\N{REPLACEMENT CHARACTER}"


def test_a_data_folder_may_hold_files_of_its_own_beside_openclaws(tmp_path):
    own = write(tmp_path / "past.jsonl", {"messages": [USER]})
    folder = tmp_path / "agents" / "main" / "sessions"
    folder.mkdir(parents=True)
    text = (FIXTURES / "v2026.3.23-2.jsonl").read_text().strip()
    theirs = [write(folder / name, text) for name in ("s.jsonl", "s.jsonl.reset.2026")]
    write(folder / "s.jsonl.lock", "no conversation")
    assert find(tmp_path) == [*theirs, own]


def test_checkpoints_are_no_conversations(tmp_path):
    own = write(tmp_path / "past.jsonl", {"messages": [USER]})
    for name in ("checkpoints", "talks"):
        (tmp_path / name / "1").mkdir(parents=True)
        write(tmp_path / name / "1" / "x.jsonl", {"messages": [USER]})
    assert find(tmp_path) == [own, tmp_path / "talks" / "1" / "x.jsonl"]


def test_each_file_is_checked_to_its_end(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER]}, "oops")
    with pytest.raises(ReplayError, match=r"a\.jsonl:2: is not JSON"):
        check([path])
