"""A process group for one trial: started, watched, ended, and told how it ended. ``launcher`` is the way in."""
