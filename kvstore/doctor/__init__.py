"""What `kvstore doctor` looks at on this host: each check is a function that looks, and says what it found and what to do."""
