# SPDX-License-Identifier: Apache-2.0
"""Builds tiny causal language models with random parameters."""

import torch
import transformers

VOCABULARY = 61

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    # Generation never meets an end, so that every sequence has the full length.
    eos_token_id=None,
    tie_word_embeddings=False,
)

# The models differ in their routers and in their experts; each comment says how.
_MODELS = {
    # The router's softmax runs over the top k logits.
    "Mixtral": dict(intermediate_size=20, num_local_experts=7, num_experts_per_tok=2),
    # The top k weights are normalised.
    "Qwen3Moe": dict(
        moe_intermediate_size=20, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True, head_dim=12
    ),
    # The weights stay as the softmax over all experts gives them. The loss includes the auxiliary loss of the router.
    "Olmoe": dict(
        intermediate_size=20, num_experts=7, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    # The router has a sigmoid, a correction bias, groups and a scale. The first layer is dense. One expert is shared.
    "DeepseekV3": dict(
        intermediate_size=28,
        moe_intermediate_size=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    # The experts have biases, interleaved and transposed weights, and a clamped gate.
    "GptOss": dict(
        intermediate_size=20,
        num_local_experts=7,
        num_experts_per_tok=3,
        head_dim=12,
        sliding_window=5,
        swiglu_limit=1.25,
    ),
    # A shared expert has a sigmoid gate of its own.
    "Qwen2Moe": dict(
        intermediate_size=28,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=7,
        num_experts_per_tok=2,
    ),
    # The correction bias applies to a softmax, and the second layer alone has experts.
    "Ernie4_5_Moe": dict(
        intermediate_size=28,
        moe_intermediate_size=20,
        moe_num_experts=7,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    # The experts have no gate and square a ReLU in a latent space. Mamba and attention layers surround them.
    "NemotronH": dict(
        layers_block_type=["mamba", "moe", "attention", "moe"],
        intermediate_size=28,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28,
        moe_latent_size=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        head_dim=12,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_n_groups=2,
        ssm_state_size=8,
        mamba_chunk_size=8,
    ),
}

MODEL_NAMES = list(_MODELS)


def build_model(name, seed=1, **options):
    """Builds a model whose experts matter: at transformers' own initial values they would hardly change a logit."""
    overrides = {**_COMMON, **_MODELS[name], **options}
    if "layers_block_type" in overrides:
        del overrides["num_hidden_layers"]
    config = getattr(transformers, f"{name}Config")(**overrides)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
            else:
                # Norms stay near one, biases near zero.
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model


def token_ids(num_sequences=2, length=23, seed=2):
    return torch.randint(1, VOCABULARY, (num_sequences, length), generator=torch.Generator().manual_seed(seed))
