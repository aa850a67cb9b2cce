"""From checked configs to jobs; imports no torch and no mlflow."""
