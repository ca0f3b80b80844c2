"""What orders cost, how well they mix, and whether training notices."""
