"""What clients of Agent Lightning 1.0 call: `routes` has the addresses, `records` and `events` have its words for
rollouts, turns and events. Its attempts count from 0, ours from 1."""
