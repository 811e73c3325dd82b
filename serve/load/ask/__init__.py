"""What is sent: inputs, templates, synthetic requests; and whether an answer is the right one."""
