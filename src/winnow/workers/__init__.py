"""Workers in other processes: started, called, watched and ended. The only place that knows Ray."""
