"""The models of the examples: small enough for two CPU cores, and nothing about them is special."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class GPT(nn.Module):
    """Predicts the next token: int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(
        self, length: int, vocabulary: int = 256, width: int = 96, num_layers: int = 2, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits of the token after each place.

        `positions` [batch, length]: of each token in its document. `mask` bool [batch, 1, length, length]:
        what each place may see, itself among it. None of either: a row is one document.
        """
        x = self.token(tokens) + (
            self.position[: tokens.shape[1]] if positions is None else self.position[positions]
        )
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Block(nn.Module):
    """Attention to what came before, then a small network at each position."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, length, width] -> the same."""
        heads = self.qkv(self.norm(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ConvNet(nn.Sequential):
    """Classifies pictures: uint8 [batch, 3, height, width] -> logits [batch, num_classes]."""

    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            # Not BatchNorm: its statistics would be those of one microbatch on one rank.
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits of the classes."""
        return super().forward(pictures / 127.5 - 1)
