"""`serve verify`: the task metric through a server, held against what `compress` measured."""
