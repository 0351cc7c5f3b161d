"""How chat models write reasoning and tool calls, for reading and for constraining them."""
