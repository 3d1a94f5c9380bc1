DROP TABLE pending_statements;
DROP TABLE statement_pushes;
DROP TABLE statement_rates;
DROP TABLE statement_requests;
DROP TABLE statement_rules;
DROP TABLE statement_subscriptions;
