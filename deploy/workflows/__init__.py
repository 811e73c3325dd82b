"""The workflows of .github, run on this machine as far as that can be: `python -m deploy.workflows`."""
