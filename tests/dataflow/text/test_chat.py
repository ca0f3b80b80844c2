"""`ChatTemplate` makes the tokens and masks of transformers; what a template cannot tell is an error."""

from __future__ import annotations

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from text_kit import MARKED, PLAIN, chat, text_in, tokenizer, write_jsonl

from dataflow import ChatTemplate, DataLoader, Packed, SampleError, ShardedDataset
from dataflow.text.chat_template import ChatText
from dataflow.text.tokenizer import MissingTextSupportError

__all__ = ["tokenizer"]
CHATS = [chat(number) for number in range(17)]
START = {"bos_token": "<|start|>"}
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves out what the assistant said before its last turn, as templates that strip thoughts do."""


def said(tokenizer: Path, sample: dict[str, Any]) -> str:
    """The text that the mask covers."""
    return text_in(tokenizer, sample["input_ids"][sample["loss_mask"]].tolist())


@pytest.mark.parametrize("template", [MARKED, MARKED.replace("{%", "{%-")])
def test_ids_and_masks_are_those_of_transformers(tokenizer: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), bos_token="<|start|>")
    stage = ChatTemplate(tokenizer, template=template, variables=START)
    for messages, sample in zip(CHATS, stage.batch([{"messages": c} for c in CHATS]), strict=True):
        made = theirs.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert sample["input_ids"].tolist() == made["input_ids"]
        assert sample["loss_mask"].int().tolist() == made["assistant_masks"]


def test_the_mask_covers_what_the_assistant_says_and_nothing_else(tokenizer: Path) -> None:
    marked, plain = (ChatTemplate(tokenizer, template=t, variables=START) for t in (MARKED, PLAIN))
    for messages in CHATS:
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert said(tokenizer, marked({"messages": messages})) == "".join(f"{a}<|end|>" for a in answers)
        assert said(tokenizer, plain({"messages": messages})) == "".join(f"{a}<|end|>\n" for a in answers)
    asked = marked({"messages": [{"role": "user", "content": "anyone?"}]})
    assert not asked["loss_mask"].any()


def test_chats_come_from_json_lines_parquet_and_json_text(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": messages, "id": number} for number, messages in enumerate(CHATS)]
    texts = [{"messages": json.dumps(row["messages"]), "id": row["id"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    shards = {
        write_jsonl(tmp_path / "x.jsonl", rows),
        write_jsonl(tmp_path / "text.jsonl", texts),
        tmp_path / "x.parquet",
    }
    stage = ChatTemplate(tokenizer, template=MARKED, variables=START)
    expected = [stage({"messages": messages}) for messages in CHATS]
    for shard in shards:
        with DataLoader(ShardedDataset(shard, transform=stage), 5, num_workers=0) as loader:
            batches = list(loader)
        for column in "input_ids", "loss_mask":
            got = [row.tolist() for batch in batches for row in batch[column].rows()]
            assert got == [sample[column].tolist() for sample in expected]
        assert [n for batch in batches for n in batch["id"].tolist()] == list(range(17))
    assert batches[0]["loss_mask"].values.dtype == torch.bool


@pytest.mark.parametrize(
    "batching", [None, Packed(64, columns=["input_ids", "loss_mask"])], ids=["plain", "packed"]
)
def test_chats_whose_answers_are_all_cut_off_are_counted_and_warned_of_once(
    tokenizer: Path, tmp_path: Path, batching: Any
) -> None:
    stage = ChatTemplate(tokenizer, template=MARKED, variables=START, max_length=8)
    long = [{"role": "user", "content": "x " * 20}, {"role": "assistant", "content": "y"}]
    short = [{"role": "assistant", "content": "y"}]
    write_jsonl(tmp_path / "x.jsonl", [{"messages": chat} for chat in (long, short, long)])
    dataset = ShardedDataset(tmp_path / "x.jsonl", transform=stage)
    with DataLoader(dataset, 1, num_workers=0, batching=batching) as loader:
        with pytest.warns(UserWarning, match="'0'.*'loss_mask': no token of it is to be learned") as told:
            assert len(list(loader)) >= 1
        assert loader.stats().untrained_samples == 2
    assert len(told) == 1


def test_keys_that_other_messages_have_are_as_if_they_were_not_there(tokenizer: Path, tmp_path: Path) -> None:
    template = MARKED.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if m.name is defined %}!{% endif %}"
    )
    stage = ChatTemplate(tokenizer, template=template, variables=START)
    named = [{"role": "user", "content": "x", "name": "Ann"}, {"role": "assistant", "content": "y"}]
    write_jsonl(tmp_path / "x.jsonl", [{"messages": named}, {"messages": chat(0)}])
    dataset = ShardedDataset(tmp_path / "x.jsonl", transform=stage)
    assert dataset[1]["input_ids"].tolist() == stage({"messages": chat(0)})["input_ids"].tolist()
    assert text_in(tokenizer, dataset[0]["input_ids"].tolist()).count("!") == 1


def test_what_a_chat_says_is_never_run(tokenizer: Path) -> None:
    stage = ChatTemplate(tokenizer, template=MARKED, variables=START)
    attack = "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"
    messages = [{"role": "user", "content": attack}, {"role": "assistant", "content": attack}]
    sample = stage({"messages": messages})
    assert said(tokenizer, sample) == f"{attack}<|end|>"
    assert text_in(tokenizer, sample["input_ids"].tolist()).count(attack) == 2
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    with pytest.raises(Exception, match=r"unsafe") as caught:
        ChatTemplate(tokenizer, template=template)({"messages": messages})
    assert type(caught.value).__name__ == "SecurityError"


def test_a_role_that_the_template_lacks_is_a_bad_sample(tokenizer: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    template += "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
    bad = [{"role": "tool", "content": "42"}]
    shard = write_jsonl(tmp_path / "x.jsonl", [{"messages": c} for c in [CHATS[0], bad, CHATS[2]]])
    dataset = ShardedDataset(shard, transform=ChatTemplate(tokenizer, template=template))
    with DataLoader(dataset, 3, num_workers=0) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert (caught.value.shard, caught.value.key, caught.value.stage) == (str(shard), "1", "transform")
    assert caught.value.reason == "TemplateError: no role tool"
    skipping = ShardedDataset(shard, transform=dataset.transform, on_error="skip")
    with DataLoader(skipping, 3, num_workers=0) as loader:
        assert len(next(iter(loader))["input_ids"].lengths) == 2


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "a chat is a list of messages, got []"),
        ("{}", "a chat is a list of messages, got {}"),
        (None, "a chat is a list of messages, got None"),
        ([{"content": "x"}], "message 0 is no dict with a \"role\": {'content': 'x'}"),
        ([{"role": "user", "content": "x"}, "y"], "message 1 is no dict with a \"role\": 'y'"),
        ("[", "Expecting value"),
    ],
)
def test_what_is_no_chat_is_told_so(tokenizer: Path, messages: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ChatTemplate(tokenizer, template=MARKED)({"messages": messages})
    assert str(caught.value).startswith(says)


def test_a_template_that_changes_earlier_turns_must_mark_what_the_assistant_says(tokenizer: Path) -> None:
    forgetful = ChatTemplate(tokenizer, template=FORGETFUL)
    one_turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert said(tokenizer, forgetful({"messages": one_turn})) == "y<|end|>"
    with pytest.raises(ValueError, match=r"where message 1, of the assistant, lies.* Put {% generation %}"):
        forgetful({"messages": [*one_turn, *one_turn]})


def test_the_template_of_a_model_is_taken_from_its_folder(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    with pytest.raises(ValueError, match=r"there is no chat template in .*: pass template="):
        ChatTemplate(tmp_path)
    expected = ChatTemplate(tokenizer, template=MARKED, variables=START)({"messages": CHATS[1]})
    start = {"bos_token": {"content": "<|start|>"}, "eos_token": None}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MARKED}]
    for config in {"chat_template": MARKED} | start, {"chat_template": several} | start:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate(tmp_path)({"messages": CHATS[1]})["input_ids"].equal(expected["input_ids"])
    (tmp_path / "chat_template.jinja").write_text(MARKED.replace("<|end|>", "<|pad|>"))
    own = ChatTemplate(tmp_path)({"messages": CHATS[1]})
    assert "<|end|>" not in text_in(tokenizer, own["input_ids"].tolist())
    (tmp_path / "mine.jinja").write_text(MARKED)
    given = ChatTemplate(tmp_path, template=tmp_path / "mine.jinja")
    assert given({"messages": CHATS[1]})["input_ids"].equal(expected["input_ids"])


def test_tools_and_variables_reach_the_template(tokenizer: Path) -> None:
    template = "{{ greeting }}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    stage = ChatTemplate(
        tokenizer, template=template, tools="tools", variables={"greeting": "<b>"}, mask="", into="ids"
    )
    sample = stage({"messages": [{"role": "user", "content": "x"}], "tools": '[{"name": "<f>"}]', "n": 1})
    assert text_in(tokenizer, sample["ids"].tolist()) == '<b>[{"name": "<f>"}]x'
    assert sample.keys() == {"ids", "n"}
    assert stage.lists == ("ids",)


def test_long_chats_are_cut_with_their_masks_or_bad_samples(tokenizer: Path) -> None:
    whole = ChatTemplate(tokenizer, template=MARKED)({"messages": CHATS[5]})
    cut = ChatTemplate(tokenizer, template=MARKED, max_length=20)({"messages": CHATS[5]})
    for column in "input_ids", "loss_mask":
        assert cut[column].equal(whole[column][:20])
    with pytest.raises(ValueError, match=r"tokens, and max_length=20"):
        ChatTemplate(tokenizer, template=MARKED, max_length=20, overlong="error")({"messages": CHATS[5]})


def test_threads_render_chats_at_the_same_time(tokenizer: Path) -> None:
    text = ChatText(MARKED, START)
    expected = [text.rendered(messages) for messages in CHATS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text.rendered, CHATS * 20)) == expected * 20


def test_processes_get_the_template_as_text_and_make_the_same(tokenizer: Path, tmp_path: Path) -> None:
    stage = ChatTemplate(tokenizer, template=MARKED, variables=START)
    copied = pickle.loads(pickle.dumps(stage))
    assert copied.fingerprint == stage.fingerprint
    assert copied({"messages": CHATS[3]})["loss_mask"].equal(stage({"messages": CHATS[3]})["loss_mask"])
    assert stage.fingerprint != ChatTemplate(tokenizer, template=PLAIN, variables=START).fingerprint
    shard = write_jsonl(tmp_path / "x.jsonl", [{"messages": messages} for messages in CHATS])
    with DataLoader(ShardedDataset(shard, transform=stage), 4, num_workers=2) as loader:
        rows = [row.tolist() for batch in loader for row in batch["input_ids"].rows()]
    assert rows == [stage({"messages": messages})["input_ids"].tolist() for messages in CHATS]


def test_a_template_that_is_none_is_refused(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the chat template is none, line 1: "):
        ChatTemplate(tokenizer, template="{% if %}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingTextSupportError, match=r"pip install 'dataflow-loader\[text\]'"):
        ChatTemplate(tokenizer, template=MARKED)


def test_a_prompt_of_json_lines_has_nothing_of_other_lines(tokenizer: Path, tmp_path: Path) -> None:
    """Keys of other lines' tools and arguments do not appear as null, however lines lie in files."""
    calls: list[dict[str, Any]] = [{"city": "Paris"}, {"n": 1, "unit": None}, {"n": 2**53 + 1}, {}]
    rows = [
        {
            "tools": [{"name": f"f{i}", "parameters": dict.fromkeys(arguments, i)}],
            "messages": [{"role": "assistant", "content": "ok", "calls": [{"arguments": arguments}]}],
        }
        for i, arguments in enumerate(calls)
    ]
    template = "{{ tools | tojson }}{{ messages[0].calls | tojson }}{% generation %}ok{% endgeneration %}"
    stage = ChatTemplate(tokenizer, template=template, tools="tools")
    want = [f"{json.dumps(row['tools'])}{json.dumps(row['messages'][0]['calls'])}ok" for row in rows]
    whole = write_jsonl(tmp_path / "whole.jsonl", rows)
    split = [write_jsonl(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(rows)]
    for source in (str(whole), [str(path) for path in split]):
        for block_bytes in (1, 1 << 20):
            dataset = ShardedDataset(source, transform=stage, block_bytes=block_bytes)
            got = [text_in(tokenizer, dataset[i]["input_ids"].tolist()) for i in range(len(rows))]
            assert got == want
