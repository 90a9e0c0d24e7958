"""Published checkpoints, made from a network's tensors name by name.

A checkpoint is a dict of tensors by stored name. Quantised experts are e4m3 with a float32 scale
for each output.
"""

from __future__ import annotations

import torch

TOWER = "vision_encoder.encoder.model.visual"


def layout_a(state, heads):
    """The network's names after `model.`, tau's weights separate."""
    stored = {}
    for name, tensor in state.items():
        if name.endswith("tau.wqwv"):
            stored[f"model.{name.removesuffix('wqwv')}wq"] = tensor[:heads].clone()
            stored[f"model.{name.removesuffix('wqwv')}wv"] = tensor[heads:].clone()
        else:
            stored[f"model.{name}"] = tensor
    return stored


def layout_b(state, config, *, fused_tau=True, kv_scales=False):
    """Names of the training code, feature tables transposed; Moondream 2's heads or 3's."""
    stored = {
        f"{TOWER}.pos_embed": state["vision.pos_emb"],
        "text_model.transformer.embd.wte.weight": state["text.wte"],
        "region_model.coordinate_features.weight": state["region.coord_features"].T.contiguous(),
        "region_model.size_features.weight": state["region.size_features"].T.contiguous(),
    }
    names = vision_names(config) | text_names(config) | region_names(config)
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            stored[f"{theirs}.{kind}"] = state[f"{ours}.{kind}"]
    for i in range(config.text.num_layers):
        ours, theirs = f"text.blocks.{i}", f"text_model.transformer.h.{i}"
        if config.text.tau is not None:
            stored |= tau_of(state, ours, theirs, config.text.num_heads, fused=fused_tau)
        if is_mixture(config, i):
            stored |= experts_of(state, ours, theirs)
        if kv_scales:
            stored[f"{theirs}.kv_quantizer.k_scale"] = torch.tensor([0.5])
            stored[f"{theirs}.kv_quantizer.v_scale"] = torch.tensor(0.25)
    return stored


def is_mixture(config, layer):
    """Whether a layer has experts."""
    return config.text.moe is not None and layer >= config.text.moe.first_layer


def vision_names(config):
    """Maps with weight and bias, ours to theirs."""
    names = {
        "vision.patch_emb": f"{TOWER}.patch_embed.linear",
        "vision.post_ln": f"{TOWER}.norm",
        "vision.proj_mlp.fc1": "vision_encoder.projection.mlp.fc1",
        "vision.proj_mlp.fc2": "vision_encoder.projection.mlp.fc2",
    }
    for i in range(config.vision.num_layers):
        ours, theirs = f"vision.blocks.{i}", f"{TOWER}.blocks.{i}"
        names |= {f"{ours}.ln1": f"{theirs}.norm1", f"{ours}.ln2": f"{theirs}.norm2"}
        names |= {
            f"{ours}.{part}": f"{theirs}.{part}"
            for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        }
    return names


def text_names(config):
    """Maps with weight and bias, ours to theirs."""
    names = {"text.post_ln": "text_model.lm_head.ln", "text.lm_head": "text_model.lm_head.linear"}
    for i in range(config.text.num_layers):
        ours, theirs = f"text.blocks.{i}", f"text_model.transformer.h.{i}"
        names |= {
            f"{ours}.ln": f"{theirs}.ln",
            f"{ours}.attn.qkv": f"{theirs}.mixer.Wqkv",
            f"{ours}.attn.proj": f"{theirs}.mixer.out_proj",
        }
        if is_mixture(config, i):
            names[f"{ours}.mlp.router"] = f"{theirs}.gate"
        else:
            names |= {f"{ours}.mlp.{fc}": f"{theirs}.mlp.{fc}" for fc in ("fc1", "fc2")}
    return names


def region_names(config):
    """Maps with weight and bias, ours to theirs."""
    names = {
        "region.coord_encoder": "region_model.coordinate_encoder",
        "region.size_encoder": "region_model.size_encoder",
    }
    if config.region.inner_dim is None:
        return names | {
            "region.ln": "region_model.ln",
            "region.coord_decoder": "region_model.coordinate_head",
            "region.size_decoder": "region_model.size_head",
        }
    for fc in ("fc1", "fc2"):
        names[f"region.coord_decoder.{fc}"] = f"region_model.coordinate_decoder.{fc}"
        names[f"region.size_decoder.{fc}"] = f"region_model.size_decoder.{fc}"
    return names


def tau_of(state, ours, theirs, heads, *, fused):
    """One layer's tau."""
    both, alpha = state[f"{ours}.attn.tau.wqwv"], state[f"{ours}.attn.tau.alpha"]
    stored = {f"{theirs}.tau_alpha": alpha}
    if fused:
        return stored | {f"{theirs}.tau_wqwv": both}
    halves = {"tau_wq": both[:heads].clone(), "tau_wv": both[heads:].clone()}
    return stored | {f"{theirs}.{name}": half for name, half in halves.items()}


def experts_of(state, ours, theirs):
    """One layer's experts, with scales if they have any."""
    names = {
        f"{theirs}.mlp.experts.weight": f"{ours}.mlp.fc1.weight",
        f"{theirs}.mlp.output_experts.weight": f"{ours}.mlp.fc2.weight",
        f"{theirs}.moe_quant.up_scale": f"{ours}.mlp.fc1.scale",
        f"{theirs}.moe_quant.down_scale": f"{ours}.mlp.fc2.scale",
    }
    return {stored: state[name] for stored, name in names.items() if name in state}


def quantised(state):
    """The same network with its experts in e4m3."""
    out = {}
    for name, tensor in state.items():
        if tensor.dim() == 3 and ".mlp.fc" in name:
            scale = tensor.float().abs().amax(-1) / 448
            out[name] = (tensor / scale[..., None]).to(torch.float8_e4m3fn)
            out[name.removesuffix("weight") + "scale"] = scale
        else:
            out[name] = tensor
    return out
