"""New versions of the program: what is signed, fetched, kept side by side, tried and taken back. Never by itself."""
