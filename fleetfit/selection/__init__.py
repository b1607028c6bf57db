"""How the clients of a round are chosen: one file and one function each, which any method takes along."""
