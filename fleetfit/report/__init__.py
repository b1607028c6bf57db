"""What a person reads of a run: tables, plots and the page, from run folders only."""
