"""Template processes, which import the packages of a role once and are forked for each of its processes."""
