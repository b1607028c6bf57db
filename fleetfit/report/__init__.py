"""What a person reads of a run: tables and plots, from run folders only."""
