"""Submit checked configs as jobs. This package imports neither torch nor mlflow."""
