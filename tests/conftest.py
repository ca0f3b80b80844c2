pytest_plugins = ["dataflow.pytest_plugin", "pytester"]
