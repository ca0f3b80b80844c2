"""Raw text, tokenized and packed into rows. Read `compare` first."""
