"""What comes next, guessed: who proposes tokens, and how many are worth a try."""
