"""What the clients of one address may do together."""

from __future__ import annotations

from ntf_server.clock import SECONDS_PER_DAY
from ntf_server.config import LimitsConfig
from transport.budget import BudgetConfig
from transport.limits import UNLIMITED, Rate, RateLimiter

SECONDS_PER_HOUR = 3600
FAILURES_PER_SECOND = 5.0
"Failed authorisations of one address that are forgotten each second."


def budget_config(config: LimitsConfig) -> BudgetConfig:
    """What the CPU budget allows each address."""
    return BudgetConfig(
        share=config.address_cpu_percent / 100,
        failures=Rate(per_second=FAILURES_PER_SECOND, burst=config.address_failures_burst),
    )


class AddressLimits:
    """What all connections of one source may do together."""

    def __init__(self, config: LimitsConfig) -> None:
        self.commands, self.tokens, self.verifications, self.rules, self.topics = (
            RateLimiter(UNLIMITED) for _ in range(5)
        )
        self.use(config)

    def use(self, config: LimitsConfig) -> None:
        """What was used up stays used up."""
        commands = Rate(per_second=config.address_commands_per_second, burst=config.address_commands_burst)
        self.commands.rate = commands
        self.tokens.rate = Rate.over(config.address_tokens_per_day, SECONDS_PER_DAY)
        self.verifications.rate = Rate.over(config.address_verifications_per_hour, SECONDS_PER_HOUR)
        self.rules.rate = Rate.over(config.address_rules_per_day, SECONDS_PER_DAY)
        self.topics.rate = Rate.over(config.address_topics_per_day, SECONDS_PER_DAY)
