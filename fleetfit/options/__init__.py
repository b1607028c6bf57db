"""Options that go with any method: one file and one function each."""
