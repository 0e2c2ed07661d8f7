"""What a user sees: progress and talk on stderr, results on stdout, JSON lines for programs."""
