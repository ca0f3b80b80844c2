"""Tiny random vision-language models, chats with pictures for them, and flash attention in plain torch.

Nothing is fetched, and no processor is used, so torchvision is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers
import transformers.modeling_flash_attention_utils as flash_module
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

IMAGE, VIDEO, BEGIN, END = 1, 2, 3, 4
"""Token ids; words are those from 8 to 95."""
SIDE = 56
PINPOINTS = [[SIDE * high, SIDE * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]


def make_model(family: str, attention: str = "sdpa") -> Any:
    """A model in float32 with large random weights, so that what leaks shows."""
    text: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    }
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    square = {**tower, "image_size": SIDE, "patch_size": 14}
    qwen = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    between = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    t = transformers
    if family == "qwen2_5_vl":
        qwen |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        parts = {"text_config": {**text, "rope_parameters": rope}, "vision_config": qwen}
        config = t.Qwen2_5_VLConfig(**parts, **special, **between)
    elif family == "qwen3_vl":
        qwen |= {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
        text |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_interleaved": True}}
        config = t.Qwen3VLConfig(text_config=text, vision_config=qwen, **special, **between)
    elif family == "qwen3_5":
        qwen |= {"patch_size": 16, "num_position_embeddings": 256}
        rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
        text |= {"num_hidden_layers": 4, "head_dim": 16, **heads, "linear_num_value_heads": 4}
        text["rope_parameters"] = rope
        config = t.Qwen3_5Config(text_config=text, vision_config=qwen, **special, **between)
    elif family == "llava":
        parts = {"text_config": t.LlamaConfig(**text), "vision_config": t.CLIPVisionConfig(**square)}
        more: dict[str, Any] = {"image_token_index": IMAGE, "vision_feature_layer": -1}
        config = t.LlavaConfig(**parts, **more, image_seq_length=16)
        config.image_token_id = IMAGE
    elif family == "llava_onevision":
        parts = {"text_config": t.Qwen2Config(**text), "vision_config": t.SiglipVisionConfig(**square)}
        more = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        config = t.LlavaOnevisionConfig(**parts, **more, image_grid_pinpoints=PINPOINTS)
        config.image_token_id, config.video_token_id = IMAGE, VIDEO
    elif family in ("idefics3", "smolvlm"):
        cls = t.Idefics3Config if family == "idefics3" else t.SmolVLMConfig
        parts = {"text_config": t.LlamaConfig(**text), "vision_config": square}
        config = cls(**parts, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    else:
        layers = ["sliding_attention", "full_attention"]
        text |= {"head_dim": 16, "sliding_window": 16, "layer_types": layers}
        parts = {"text_config": text, "vision_config": {**square, "vision_use_head": False}}
        config = t.Gemma3Config(**parts, mm_tokens_per_image=4, image_token_index=IMAGE)
        config.image_token_id = IMAGE
    model_class = {
        "qwen2_5_vl": t.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": t.Qwen3VLForConditionalGeneration,
        "qwen3_5": t.Qwen3_5ForConditionalGeneration,
        "llava": t.LlavaForConditionalGeneration,
        "llava_onevision": t.LlavaOnevisionForConditionalGeneration,
        "idefics3": t.Idefics3ForConditionalGeneration,
        "smolvlm": t.SmolVLMForConditionalGeneration,
        "gemma3": t.Gemma3ForConditionalGeneration,
    }[family]
    model = model_class._from_config(config, attn_implementation=attention)
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            # Linear attention makes more of float32's rounding: 4e-4 with 0.15, of a sample alone.
            torch.nn.init.normal_(weight, 0, 0.08 if family == "qwen3_5" else 0.15)
    return model.eval().float()


def make_chat(family: str, model: Any, number: int) -> dict[str, Tensor]:
    """What a processor makes of one chat of words and 0 to 3 pictures, and which tokens are to be learned."""
    random = torch.Generator().manual_seed(number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def noise(*shape: int) -> Tensor:
        """Pixels between -1 and 1, as processors normalise them."""
        return torch.rand(*shape, generator=random) * 2 - 1

    count = number % 4
    chat: dict[str, Tensor] = {}
    if family.startswith("qwen"):
        patch = model.config.vision_config.patch_size
        sizes = [(1, 2 * draw(1, 6), 2 * draw(1, 6)) for _ in range(count)]
        grids = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 3)
        chat = {"image_grid_thw": grids, "pixel_values": noise(int(grids.prod(1).sum()), 6 * patch**2)}
        runs = [high * wide // 4 for _, high, wide in sizes]
    elif family == "llava":
        chat, runs = {"pixel_values": noise(count, 3, SIDE, SIDE)}, [16] * count
    elif family == "llava_onevision":
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        sizes = [(draw(30, 200), draw(30, 200)) for _ in range(count)]
        tiles = [image_size_to_num_patches([*size], PINPOINTS, SIDE) for size in sizes]
        image_sizes = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)
        most = max(tiles, default=1) if count == 1 else 1
        chat = {"pixel_values": noise(count, most, 3, SIDE, SIDE), "image_sizes": image_sizes}
        runs = []
        if count:
            with torch.no_grad():
                pictures = model.get_image_features(
                    **chat,
                    vision_feature_layer=-1,
                    vision_feature_select_strategy="full",
                    batch_num_images=torch.tensor([count]),
                    return_dict=True,
                ).pooler_output
            runs = [*map(len, pictures)]
    elif family in ("idefics3", "smolvlm"):
        tiles = [draw(1, 4) for _ in range(count)]
        runs = [4] * sum(tiles)
        shape = (1, sum(tiles)) if count else (0, 0)
        pixels = noise(*shape, 3, SIDE, SIDE)
        mask = torch.ones(*shape, SIDE, SIDE, dtype=torch.bool)
        mask[..., 42:] = number % 2 == 0
        chat = {"pixel_values": pixels, "pixel_attention_mask": mask}
    else:
        chat, runs = {"pixel_values": noise(count, 3, SIDE, SIDE)}, [4] * count
    pieces, learned = [], []
    for length in [*runs, 0]:
        words = torch.randint(8, 96, (draw(3, 25),), generator=random)
        tokens = [BEGIN, *[IMAGE] * length, END] if length else []
        pieces += [words, torch.tensor(tokens, dtype=torch.int64)]
        learned += [torch.arange(len(words)) > len(words) // 2, torch.zeros(len(tokens), dtype=torch.bool)]
    ids = torch.cat(pieces)
    return {"input_ids": ids, "loss_mask": torch.cat(learned).long(), **chat}


def alone(family: str, chat: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of one chat by itself, as its processor gives them."""
    ids, mask = chat["input_ids"][None], chat["loss_mask"][None]
    kinds = (ids == IMAGE).long()
    out: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    if family == "gemma3":
        out["token_type_ids"] = kinds
    if not len(chat["pixel_values"]):
        return out
    out |= {name: value for name, value in chat.items() if name not in ("input_ids", "loss_mask")}
    if family.startswith("qwen"):
        out["mm_token_type_ids"] = kinds
    if family == "llava_onevision":
        out["batch_num_images"] = torch.tensor([len(chat["pixel_values"])])
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    q, k, v = (each.transpose(0, 1).float() for each in (q, k, v))
    scores = q @ k.transpose(1, 2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    query, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window is not None and window[0] >= 0:
        seen &= key >= query - window[0]
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Any = None,
) -> Tensor:
    """The contract of `flash_attn_varlen_func`; bounds of another sequence are refused."""
    ends = cu_seqlens_q.tolist()
    assert (ends[0], ends[-1]) == (0, len(q)), f"cu_seqlens {ends} of something else: {len(q)} places"
    parts = [slice(*bounds) for bounds in pairwise(ends)]
    return torch.cat([_attend(q[p], k[p], v[p], softmax_scale, causal, window_size) for p in parts])


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Any = None,
) -> Tensor:
    """The contract of `flash_attn_func`."""
    rows = zip(q, k, v, strict=True)
    return torch.stack([_attend(*row, softmax_scale, causal, window_size) for row in rows])


def flash_stand_in(monkeypatch: Any, model: Any) -> Any:
    """A model whose flash attention is plain torch."""
    u = flash_module
    values = {
        "_flash_fn": flash,
        "_flash_varlen_fn": flash_varlen,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": u._pad_input,
        "_unpad_fn": u._unpad_input,
        "_process_with_kvcache_kwargs_fn": dict,
        "_process_flash_kwargs_fn": u._lazy_define_process_function(flash_varlen),
        "_loaded_implementation": "flash_attention_2",
    }
    for name, value in values.items():
        monkeypatch.setattr(u, name, value, raising=False)
    for module in model.modules():
        config = getattr(module, "config", None)
        for each in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
            if each is not None:
                each._attn_implementation_internal = "flash_attention_2"
    return model


def linear_stand_in(monkeypatch: Any) -> None:
    """Linear attention that keeps segments apart, as the kernels do that this machine lacks."""

    def plain(function: Callable[..., Any]) -> Callable[..., Any]:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        return function

    chunked = plain(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    convolved = plain(modeling_qwen3_5.causal_conv1d_fn)
    known = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "chunk_size")

    def chunk(
        query: Any, key: Any, value: Any, g: Any, beta: Any, cu_seqlens: Any = None, **more: Any
    ) -> Any:
        more = {name: each for name, each in more.items() if name in known}
        if cu_seqlens is None:
            return chunked(query, key, value, g=g, beta=beta, **more)
        parts = [slice(*bounds) for bounds in pairwise(cu_seqlens.tolist())]
        outs = [
            chunked(query[:, p], key[:, p], value[:, p], g=g[:, p], beta=beta[:, p], **more)[0] for p in parts
        ]
        return torch.cat(outs, 1), None

    def causal(x: Tensor, weight: Any, bias: Any = None, activation: Any = None, **more: Any) -> Any:
        numbers = more.get("seq_idx")
        if numbers is None:
            return convolved(x, weight, bias, activation=activation)
        cuts = [0, *(numbers[0].diff().nonzero()[:, 0] + 1).tolist(), x.shape[-1]]
        parts = [convolved(x[..., a:b], weight, bias, activation=activation) for a, b in pairwise(cuts)]
        return torch.cat(parts, -1)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chunk)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", causal)
