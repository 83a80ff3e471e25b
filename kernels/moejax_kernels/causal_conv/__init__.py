"""Short causal depthwise convolution."""

from moejax_kernels.causal_conv.api import causal_conv as causal_conv
