"""The adaptive loader on a virtual clock. Read `store` first."""
