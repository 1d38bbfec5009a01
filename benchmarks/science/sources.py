"""Where the published figures come from. The essays are unpublished."""

GRADIENTS = "the essay on loss and gradients"
ACCUMULATION = "the essay on accumulation"
ROUTER = "the essay on router stability"
SWITCH = "Fedus et al., 2021, Switch Transformers"
ST_MOE = "Zoph et al., 2022, ST-MoE"
GPT2 = "Radford et al., 2019, GPT-2"
MIXED_PRECISION = "Micikevicius et al., 2018, mixed precision training"
