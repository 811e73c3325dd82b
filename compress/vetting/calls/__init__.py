"""What a graph from a file may call: functions, operators, the arguments that are dangerous, how far values may
grow."""
