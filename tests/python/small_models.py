# SPDX-License-Identifier: Apache-2.0
"""Any architecture of transformers' registry, small and with random weights, and inputs that fit it."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 99
LENGTH = 9  # of the text
WIDTH, HEADS = 32, 4
LARGEST_MODEL = 30_000_000  # parameters

# What a field of a configuration is set to where it is a whole number, by the first pattern that its name has.
SIZES = [
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 8),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"linear_num_(key|value)_heads|linear_num_heads", 2),
    (r"linear_(key|value)_head_dim", 8),
    (r"^(num_)?(key_value|kv)_heads$|num_key_value_heads$|^n_kv_heads$|num_kv_heads$|key_value_heads$", 2),
    (r"^(head_dim|d_kv|global_head_dim|swa_head_dim|swa_v_head_dim|v_head_dim|attention_head_dim)$", WIDTH // HEADS),
    (r"^(qk_nope_head_dim|qk_rope_head_dim|qk_head_dim|index_head_dim|attention_key_dim)$", WIDTH // HEADS),
    (r"(^|_)(attention_heads|n_heads?|num_heads|heads|n_head|num_attention_heads|index_n_heads)$", HEADS),
    (r"^(kv_lora_rank|q_lora_rank|o_lora_rank)$", 16),
    (r"moe_intermediate_size|expert_ffn|shared_expert_intermediate|moe_ffn", 16),
    (r"intermediate|(^|_)ffn_dim$|^d_ff$|d_inner$|^n_inner$|feedforward|ffn_hidden|mlp_dim|^hidden_dim$|ff_dim", 48),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|width|model_dim|output_dim|out_hidden_size)$", WIDTH),
    (r"(^|_)(hidden_size|d_model|embed_dim|projection_dim|hidden_dim|projection_size|embedding_dim|proj_dim)$", WIDTH),
    (r"experts_per_tok|topk$|top_k$|moe_k$|num_selected_experts|moe_topk", 2),
    (r"^(n_group|topk_group|moe_layer_start_index|first_k_dense_replace)$", 1),
    (r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|num_dense_experts", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"(^|_)(num_layers|n_layers?|layers|depth|num_hidden_layers|num_blocks|n_blocks|num_decoder_layers)$", 2),
    (r"vocab_size|^vocabulary_size$|num_embeddings$|codebook_size", VOCABULARY),
    (r"max_position|^n_positions$|^n_ctx$|max_seq_len|max_sequence_length|context_length|model_max_length", 128),
    (r"sliding_window$|attention_window|local_attention$|window_size$|attention_chunk_size", 4),
    (r"image_size$|^img_size$|input_size$", 32),
    (r"patch_size$", 8),
    (r"num_mel_bins|^n_mels$|feature_size$|input_feat_per_channel", 16),
    (r"max_source_positions", 24),
    (r"hidden_size_per_layer_input", 8),
    (r"^rotary_dim$", 4),
    (r"num_labels$", 3),
]
# Of models that mix attention with something else: of two layers, the second has it.
MIXED = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "attn_layer_indices": [1], "full_attn_idxs": [1], "prediction_length": 4, "index_topk": 4,
         "attention_types": [[["global", "local"], 1]]}  # fmt: skip
KEEP = re.compile(
    r"feat_extract|conv_|token_id|_id$|index$|version|^_|dropout|eps|ratio|factor|theta|pad|kernel|stride|group_size|codebook"
)
FEW = re.compile(r"layers?$|depth|vocab|experts|positions|^n_ctx$|intermediate|ffn")  # that change no shape inside


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _shrunk_number(name, value, only):
    if KEEP.search(name) or (only and not FEW.search(name)) or value is None:
        return value
    for pattern, size in SIZES:
        if re.search(pattern, name):
            return min(size, value) if value > 0 else value
    return value


def _shrunk_tokens(fields):
    """Special tokens inside the small vocabulary, those of images and the like each one of its own."""
    free = iter(range(VOCABULARY - 1, 4, -1))
    for name, value in fields.items():
        if re.search(r"token_id$|token_index$|_token$", name) and _whole(value) and value >= VOCABULARY - 30:
            usual = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
            fields[name] = usual[name] if name in usual else next(free)
        elif name == "eos_token_id" and isinstance(value, list):
            fields[name] = 2
    return fields


def _kinds(values, count):
    """The first `count` of a list that has one entry a layer, each kind of layer among them if that goes."""
    kinds = list(dict.fromkeys(values))
    chosen = (kinds + [v for v in values if v == values[-1]])[:count]
    return sorted(chosen, key=values.index) if len(chosen) == count else list(values[:count])


def shrunk(fields, only=False):
    """The fields of a configuration, as to_dict() gives them, of a small model."""
    layers = next(
        (v for n, v in fields.items() if _whole(v) and re.search(r"^(num_hidden_layers|n_layers?)$", n)), None
    )
    new = {}
    for name, value in fields.items():
        if isinstance(value, dict) and ("rope" in name):
            value = {k: (shrunk_rope(v) if isinstance(v, dict) else v) for k, v in shrunk_rope(value).items()}
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value) and "quant" not in name:
            value = shrunk(value, only)
        elif isinstance(value, (list, tuple)) and layers and len(value) == layers and layers > 2:
            value = _kinds([v if not isinstance(v, list) else tuple(v) for v in value], 2)
        elif isinstance(value, (list, tuple)) and name in ("image_size", "patch_size") and all(map(_whole, value)):
            value = [_shrunk_number(name, v, only) for v in value]
        elif _whole(value):
            value = _shrunk_number(name, value, only)
        new[name] = MIXED.get(name, value)
    if _whole(new.get("num_attention_heads")) and new.get("num_key_value_heads") and not only:
        same = fields.get("num_attention_heads") == fields.get("num_key_value_heads")
        new["num_key_value_heads"] = HEADS if same else min(2, new["num_key_value_heads"])
    return _shrunk_tokens(new)


def shrunk_rope(value):
    value = dict(value)
    if "mrope_section" in value:
        value["mrope_section"] = [2, 1, 1]
    for name in ("short_factor", "long_factor"):
        if isinstance(value.get(name), (list, tuple)):
            value[name] = [1.0] * (WIDTH // HEADS // 2)
    if _whole(value.get("original_max_position_embeddings")):
        value["original_max_position_embeddings"] = 64
    return value


def _drop(fields):
    """Takes away what is derived from other fields, or says nothing about the architecture."""
    for name in ("transformers_version", "architectures", "torch_dtype", "dtype", "id2label", "label2id",
                 "out_features", "out_indices", "stage_names", "per_layer_config", "num_labels",
                 "attention_layers"):  # fmt: skip
        fields.pop(name, None)
    for value in fields.values():
        if isinstance(value, dict):
            _drop(value)


def configurations(model_type):
    """Configurations of an architecture, from the smallest to the library's own."""
    whole = transformers.AutoConfig.for_model(model_type)
    fields = whole.to_dict()
    for name, kind in getattr(whole, "sub_configs", {}).items():
        if fields.get(name) is None and hasattr(kind, "model_type") and kind.model_type:
            fields[name] = kind().to_dict()
    _drop(fields)
    if any("mrope_section" in f.read_text() for f in Path(inspect.getfile(type(whole))).parent.glob("modeling_*.py")):
        for part in (fields, fields.get("text_config")):
            for name in ("rope_parameters", "rope_scaling"):
                if isinstance(part, dict) and name in part:
                    own = part[name] or {}
                    nested = any(isinstance(value, dict) for value in own.values())
                    for each in own.values() if nested else ():
                        each["mrope_section"] = [2, 1, 1]
                    part[name] = own if nested else {"rope_type": "default", **own, "mrope_section": [2, 1, 1]}
    for only in (False, True):
        try:
            yield type(whole).from_dict(shrunk(copy.deepcopy(fields), only))
        except Exception as error:
            yield error
    yield whole


def classes(model_type, config):
    """The models that are tried: the base, and the one that generates."""
    names = []
    for mapping in (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
    ):
        found = getattr(auto, mapping).get(model_type)
        for name in [found] if isinstance(found, str) else list(found or ())[:1]:
            names.append((name, mapping))
    encoder_too = hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False)
    chosen = [n for n in names if n[1] != "MODEL_MAPPING_NAMES"][:1]
    if not chosen or encoder_too:
        chosen += [n for n in names if n[1] == "MODEL_MAPPING_NAMES"]
    for name, mapping in chosen:
        kind = getattr(transformers, name, None)
        if kind is not None:
            yield kind, {"is_decoder": True} if encoder_too and "CAUSAL" in mapping else {}


def randomise(model, seed=0):
    """Weights of which every part of the model shows: scores of about 1, biases and position biases too."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, scale, around=0.0):
        tensor.copy_((torch.randn(tensor.shape, generator=generator) * scale + around).to(tensor.dtype))

    own = r"A_log|dt_|\.D$|a_param|lambda|decay|rope|freq|e_score"
    with torch.no_grad():
        for path, module in model.named_modules():
            usual = isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or "Conv" in type(module).__name__
            for name, tensor in module.named_parameters(recurse=False):
                if not tensor.is_floating_point() or re.search(own, f"{path}.{name}"):
                    continue
                if tensor.dim() < 2:
                    normal(tensor, 0.1, 1.0 if name.startswith("weight") else 0.0)
                elif isinstance(module, torch.nn.Embedding):
                    normal(tensor, 1.0)
                elif usual and "Conv1D" in type(module).__name__ and not isinstance(module, torch.nn.Conv1d):
                    normal(tensor, tensor.shape[0] ** -0.5)
                else:
                    normal(tensor, (tensor.numel() // tensor.shape[0]) ** -0.5 if usual else tensor.shape[-1] ** -0.5)


def _of(config, *names):
    """The first of the fields that the configuration or one of its parts has."""
    parts = [
        config,
        *(getattr(config, n, None) for n in ("vision_config", "audio_config", "encoder", "backbone_config")),
    ]
    for part in parts:
        for name in names:
            value = getattr(part, name, None) if part is not None else None
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value
    return None


def inputs(model, padding="none", seed=1):
    """Candidates of what to call the model with: {name: tensor}; the likeliest first."""
    generator = torch.Generator().manual_seed(seed)
    config, wanted = model.config, set(inspect.signature(model.forward).parameters)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding == "left":
        mask[1, :3] = 0
    elif padding == "right":
        mask[1, -3:] = 0

    def floats(*shape):
        return torch.randn(*shape, generator=generator)

    def tokens(length):
        ids = torch.randint(5, 60, (2, length), generator=generator)
        # What is taken for all of a text, the largest number or the end's mark (CLIP's two ways), must not be padding.
        end = _of(getattr(config, "text_config", None) or config, "eos_token_id")
        if length == LENGTH:
            ids[:, 4] = 61
            ids[:, 5] = end if isinstance(end, int) and not hasattr(model, "generate") else ids[:, 5]
        return ids

    text = {"input_ids": tokens(LENGTH)}
    if "attention_mask" in wanted and padding != "none":
        text["attention_mask"] = mask
    size, channels = _of(config, "image_size", "img_size") or 32, _of(config, "num_channels", "in_channels") or 3
    image = {"pixel_values": floats(2, channels, size, size)}
    mels = _of(config, "num_mel_bins", "n_mels", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
    frames = 2 * (_of(config, "max_source_positions") or 24)
    spectrum = {"input_features": floats(2, mels or 16, frames)}
    turned = {"input_features": floats(2, frames, mels or 16)}
    wave = {"input_values": floats(2, 2400)}
    picture_of_sound = {"input_values": floats(2, _of(config, "max_length") or 24, mels or 16)}
    grid = {"grid_thw": torch.tensor([[1, 4, 4]])}
    patches = (_of(config, "temporal_patch_size") or 1) * channels * (_of(config, "patch_size") or 8) ** 2
    tiles = [{name: floats(16, patches), **grid} for name in ("pixel_values", "hidden_states") if name in wanted]
    box = {"bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long)}
    decoder = {"decoder_input_ids": tokens(5)}
    heads = [text] if "input_ids" in wanted else []
    heads += [image] if "pixel_values" in wanted else []
    heads += [spectrum, turned] if "input_features" in wanted else []
    heads += [wave, picture_of_sound] if "input_values" in wanted else []
    heads += tiles if "grid_thw" in wanted else []
    both = [{**a, **b} for a in heads[:1] for b in heads[1:]]
    for head in [*heads, *both, *({**h, **box} for h in heads if "bbox" in wanted)]:
        if "decoder_input_ids" in wanted:
            yield {**head, **decoder}
        yield head


def valid(name, value, given):
    """True where an entry of a result means something: where the text is not padding."""
    mask = given.get("attention_mask")
    if mask is None or ("decoder_input_ids" in given and "encoder" not in name):
        return torch.ones_like(value, dtype=torch.bool)
    if value.dim() >= 2 and value.shape[:2] == mask.shape:
        return mask.bool().reshape(*mask.shape, *[1] * (value.dim() - 2)).expand_as(value)
    return torch.ones_like(value, dtype=torch.bool)


def tell_memory(set_attribute):
    """Continuous batching asks for the memory that there is, which transformers knows of GPUs alone, or with psutil."""
    places = ["cache", "cache_manager", "continuous_api", "initialization", "requests", "utils"]
    for place in places:
        try:
            module = importlib.import_module(f"transformers.generation.continuous_batching.{place}")
        except ImportError:
            continue
        if hasattr(module, "get_device_and_memory_breakdown"):
            told = (torch.device("cpu"), 1 << 30, 0, 0)
            set_attribute(module, "get_device_and_memory_breakdown", lambda *args, told=told: told)


def generate_batch(model, prompts, tokens=6):
    """The texts that continuous batching makes of prompts, eight tokens a step."""
    options = {}
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if hasattr(transformers, "ContinuousBatchingConfig"):
        kind = transformers.ContinuousBatchingConfig
        sizes = {"num_blocks": 16, "max_batch_tokens": 8, "auto_switch_to_flash": False}  # the last not in 5.17
        known = inspect.signature(kind).parameters
        options["continuous_batching_config"] = kind(**{k: v for k, v in sizes.items() if k in known})
    else:  # transformers 4
        config.num_blocks, config.max_batch_tokens = 16, 8
    results = model.generate_batch(prompts, generation_config=config, progress_bar=False, **options)
    of = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    return [of.get(tuple(prompt), []) for prompt in prompts]
