"""A rank's memory over one window, replayed tensor by tensor without tensors: who makes what, and when it goes."""
