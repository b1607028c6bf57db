"""Reports on runs: tables, figures and the page, made from run folders only."""
