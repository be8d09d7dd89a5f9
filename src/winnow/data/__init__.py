"""Where prompts come from: files, generated tasks, chat templates, and a loader that can resume."""
