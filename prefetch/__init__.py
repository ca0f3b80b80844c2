"""Bytes in motion: store reads, the byte ledger, the buffer arena, threads, and ordered delivery."""
