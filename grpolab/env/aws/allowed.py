"""What a command may do: the operations of each service, as `aws SERVICE OPERATION` names them.

Nothing that runs code or containers on the host (lambda, ecs, codebuild), that calls addresses which a command names
(cloudformation, apigateway, firehose, states), or that only a real account has (configure, sso, support).
"""

from __future__ import annotations

_TEXT = {
    "s3api": """create-bucket delete-bucket head-bucket list-buckets get-bucket-location
        put-object get-object head-object delete-object delete-objects copy-object list-objects list-objects-v2
        list-object-versions get-object-tagging put-object-tagging delete-object-tagging get-object-acl put-object-acl
        get-bucket-versioning put-bucket-versioning get-bucket-tagging put-bucket-tagging delete-bucket-tagging
        get-bucket-encryption put-bucket-encryption delete-bucket-encryption get-bucket-policy put-bucket-policy
        delete-bucket-policy get-bucket-policy-status get-bucket-acl put-bucket-acl get-bucket-cors put-bucket-cors
        delete-bucket-cors get-bucket-lifecycle-configuration put-bucket-lifecycle-configuration delete-bucket-lifecycle
        get-bucket-website put-bucket-website delete-bucket-website get-bucket-logging put-bucket-logging
        get-public-access-block put-public-access-block delete-public-access-block get-bucket-ownership-controls
        put-bucket-ownership-controls delete-bucket-ownership-controls get-bucket-notification-configuration
        put-bucket-notification-configuration""",
    "dynamodb": """create-table delete-table describe-table list-tables update-table put-item get-item update-item delete-item
        query scan batch-get-item batch-write-item transact-get-items transact-write-items describe-time-to-live
        update-time-to-live tag-resource untag-resource list-tags-of-resource describe-continuous-backups
        update-continuous-backups describe-limits""",
    "sqs": """create-queue delete-queue get-queue-url list-queues get-queue-attributes set-queue-attributes send-message
        send-message-batch receive-message delete-message delete-message-batch purge-queue change-message-visibility
        tag-queue untag-queue list-queue-tags add-permission remove-permission""",
    "sns": """create-topic delete-topic list-topics get-topic-attributes set-topic-attributes subscribe unsubscribe
        list-subscriptions list-subscriptions-by-topic get-subscription-attributes set-subscription-attributes publish
        publish-batch tag-resource untag-resource list-tags-for-resource""",
    "iam": """create-user delete-user get-user list-users tag-user untag-user list-user-tags
        create-group delete-group get-group list-groups add-user-to-group remove-user-from-group
        list-groups-for-user create-role delete-role get-role list-roles update-role update-role-description
        update-assume-role-policy tag-role untag-role list-role-tags create-policy delete-policy get-policy list-policies
        create-policy-version delete-policy-version get-policy-version list-policy-versions
        attach-user-policy detach-user-policy list-attached-user-policies attach-group-policy detach-group-policy
        list-attached-group-policies attach-role-policy detach-role-policy list-attached-role-policies
        put-user-policy get-user-policy delete-user-policy list-user-policies put-group-policy get-group-policy
        delete-group-policy list-group-policies put-role-policy get-role-policy delete-role-policy list-role-policies
        create-access-key delete-access-key list-access-keys update-access-key list-entities-for-policy
        create-instance-profile delete-instance-profile get-instance-profile list-instance-profiles
        add-role-to-instance-profile remove-role-from-instance-profile list-instance-profiles-for-role
        get-account-summary create-account-alias delete-account-alias list-account-aliases
        get-account-password-policy update-account-password-policy delete-account-password-policy""",
    "sts": "get-caller-identity",
    "ssm": """put-parameter get-parameter get-parameters get-parameters-by-path describe-parameters get-parameter-history
        delete-parameter delete-parameters add-tags-to-resource remove-tags-from-resource list-tags-for-resource
        label-parameter-version""",
    "secretsmanager": """create-secret delete-secret describe-secret list-secrets get-secret-value put-secret-value
        update-secret restore-secret tag-resource untag-resource list-secret-version-ids get-random-password
        update-secret-version-stage""",
    "kms": """create-key describe-key list-keys enable-key disable-key schedule-key-deletion cancel-key-deletion
        create-alias update-alias delete-alias list-aliases enable-key-rotation disable-key-rotation
        get-key-rotation-status get-key-policy put-key-policy list-key-policies update-key-description
        tag-resource untag-resource list-resource-tags encrypt decrypt""",
    "logs": """create-log-group delete-log-group describe-log-groups create-log-stream delete-log-stream
        describe-log-streams put-log-events get-log-events filter-log-events put-retention-policy
        delete-retention-policy tag-log-group untag-log-group list-tags-log-group tag-resource untag-resource
        list-tags-for-resource put-metric-filter delete-metric-filter describe-metric-filters""",
    "cloudwatch": """put-metric-alarm describe-alarms delete-alarms describe-alarms-for-metric set-alarm-state
        enable-alarm-actions disable-alarm-actions put-metric-data list-metrics get-metric-statistics
        put-dashboard get-dashboard list-dashboards delete-dashboards tag-resource untag-resource
        list-tags-for-resource""",
    "events": """put-rule delete-rule describe-rule list-rules enable-rule disable-rule put-targets remove-targets
        list-targets-by-rule create-event-bus delete-event-bus describe-event-bus list-event-buses
        create-archive delete-archive describe-archive list-archives update-archive
        tag-resource untag-resource list-tags-for-resource""",
}

OPERATIONS: dict[str, frozenset[str]] = {service: frozenset(text.split()) for service, text in _TEXT.items()}

# MiniStack's own names of these services, for its SERVICES variable: what is not named there is not even loaded.
SIMULATED = ("s3", "dynamodb", "sqs", "sns", "iam", "sts", "ssm", "secretsmanager", "kms", "logs", "monitoring", "events")
