"""One file a task: model, data, loss and metric around the library."""
