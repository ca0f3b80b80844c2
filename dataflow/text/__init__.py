"""Turn text into tokens: transforms with a batch form, which tokenizers want.

In: samples with text, chats, or pairs of answers. Out: samples with token ids and loss masks, as 1-D tensors.
Read `tokenize` first; `tokenizer` is the file that all of them work with, `chat` turns messages into tokens,
`chat_template` into text, and `pairs` keeps two answers together.
"""
