"""The libp2p process: started, watched and told what to do; incoming streams; probes by TCP."""
