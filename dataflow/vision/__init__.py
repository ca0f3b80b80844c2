"""Turn chats with pictures into tokens, positions and patches: transforms that also measure without pixels.

In: samples with messages and encoded pictures. Out: token ids, loss masks, positions, patches and grids.
Read `chat` first; `family` says what each family of models wants, `pictures` reads sizes and pixels.
"""
