"""Methods: one file and one function each; a method is its difference from FedAvg."""
